"""A deep ensemble: where the chains of a Bayesian neural network start."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _loop, _tree


def warmstart(
    loss_fn: Callable[[optax.Params, Any], jax.Array],
    init_fn: Callable[[jax.Array], optax.Params],
    batches: Iterable[Any],
    optimizer: optax.GradientTransformation,
    *,
    num_members: int,
    key: jax.Array,
    num_epochs: int = 100,
    validation: Any = None,
    patience: int = 10,
    per_member: bool = False,
    progress: bool = True,
) -> optax.Params:
    """Train the members of a deep ensemble side by side, each stopped early on its own.

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, scalar, without the prior.
        init_fn: `init_fn(key)` gives the initial parameters of a member.
        batches: one pass is one epoch; it is gone through again for each. Batches of one shape
            compile once.
        optimizer: any Optax optimizer.
        num_members: number of members, >= 1.
        key: JAX key; members get initial parameters of their own.
        num_epochs: largest number of passes, >= 1.
        validation: a batch on which the loss decides, after each epoch, which weights of a member
            are its best so far; None keeps the last ones.
        patience: epochs without improvement after which a member is done, >= 1.
        per_member: whether each batch has a leading member axis; otherwise members share them.
        progress: show a progress bar, if tqdm is installed.

    Returns:
        Parameters of all members, each leaf `[member, ...]`: the best ones by validation loss.
        Keyboard interrupt ends the training and returns what there is.

    Raises:
        ValueError: an argument out of range, a loss that is not a scalar, no batches, or a member
            whose loss never was finite.

    Cost: one gradient per member and batch; twice the parameters for the best weights.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optax_smile
        >>> x, y = jnp.arange(8.0), 3 * jnp.arange(8.0)
        >>> loss_fn = lambda params, batch: jnp.mean((params["w"] * batch[0] - batch[1]) ** 2)
        >>> init_fn = lambda key: {"w": jax.random.normal(key)}
        >>> members = optax_smile.warmstart(
        ...     loss_fn, init_fn, [(x, y)], optax.adam(0.1), num_members=4,
        ...     key=jax.random.key(0), num_epochs=200, progress=False,
        ... )
        >>> [round(float(w), 2) for w in members["w"]]
        [3.0, 3.0, 3.0, 3.0]

    Source: Lakshminarayanan et al. 2017; as the start of chains Sommer et al. 2024.
    """
    for name, value in (("num_members", num_members), ("num_epochs", num_epochs)):
        _check.whole("warmstart", name, value, 1)
    _check.whole("warmstart", "patience", patience, 1)
    batch_axis = 0 if per_member else None
    optimizer = optax.with_extra_args_support(optimizer)

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    params = jax.jit(jax.vmap(init_fn))(jax.random.split(key, num_members))
    state = jax.jit(jax.vmap(optimizer.init))(params)
    train = jax.jit(jax.vmap(step, in_axes=(0, 0, batch_axis)), donate_argnums=(0, 1))
    evaluate = jax.jit(jax.vmap(loss_fn, in_axes=(0, None)))

    @jax.jit
    def keep_better(best, best_loss, params, loss):
        better = loss < best_loss
        return jax.vmap(_tree.where)(better, params, best), jnp.fmin(loss, best_loss), better

    best = jax.tree.map(jnp.copy, params)
    best_loss, stale = jnp.full(num_members, jnp.inf), jnp.zeros(num_members, int)
    bar = _loop.progress_bar(num_epochs, "warm start", progress)
    try:
        for epoch in range(num_epochs):
            loss = None
            for batch in batches:
                if epoch == 0 and loss is None:
                    _loop.check_batch("warmstart", loss_fn, params, batch, per_member, num_members)
                params, state, loss = train(params, state, batch)
            if loss is None:
                rule = "an iterable that yields batches in every epoch, such as a list"
                _check.fail("warmstart", "batches", rule, f"none in epoch {epoch + 1}")
            if validation is None:
                best_loss = loss
            else:
                loss = evaluate(params, validation)
                best, best_loss, better = keep_better(best, best_loss, params, loss)
                stale = jnp.where(better, 0, stale + 1)
            if bar is not None:
                bar.set_postfix(refresh=False, loss=f"{float(jnp.mean(best_loss)):.4f}")
                bar.update()
            if bool(jnp.all(stale >= patience)):
                break
    except KeyboardInterrupt:
        if not jnp.any(jnp.isfinite(best_loss)):
            raise
    finally:
        if bar is not None:
            bar.close()
    lost = [member for member in range(num_members) if not jnp.isfinite(best_loss[member])]
    if lost:
        rule = "one under which every member reaches a finite loss"
        _check.fail("warmstart", "optimizer", rule, f"none for the members {lost}")
    return params if validation is None else best
