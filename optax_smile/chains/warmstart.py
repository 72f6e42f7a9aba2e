"""A deep ensemble: where the chains of a Bayesian neural network start."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _tree, parallel
from optax_smile.chains import _loop
from optax_smile.chains._checkpoint import Checkpoints, Lock, any_process


class Members(NamedTuple):
    """What travels from step to step, every leaf `[member, ...]`.

    Attributes:
        params: after the last step.
        state: of the optimizer.
        loss: of the last batch.
        best: parameters with the smallest validation loss so far.
        best_loss: that loss.
        stale: epochs since then, int32.
    """

    params: Any
    state: Any
    loss: jax.Array
    best: Any
    best_loss: jax.Array
    stale: jax.Array


def warmstart(
    loss_fn: Callable[[optax.Params, Any], jax.Array],
    init_fn: Callable[[jax.Array], optax.Params],
    batches: Iterable[Any],
    optimizer: optax.GradientTransformation,
    *,
    num_members: int,
    key: jax.Array | int,
    num_epochs: int = 100,
    validation: Any = None,
    patience: int = 10,
    per_member: bool = False,
    mesh: Mesh | None = None,
    specs: Any = None,
    directory: str | os.PathLike | None = None,
    checkpoint_minutes: float = 5.0,
    progress: bool = True,
) -> optax.Params:
    """Train the members of a deep ensemble side by side, each stopped early on its own.

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, scalar, without the prior.
        init_fn: `init_fn(key)` gives the initial parameters of a member.
        batches: one pass is one epoch; it is gone through again for each. Batches of one shape
            compile once.
        optimizer: any Optax optimizer; schedules count its steps.
        num_members: number of members, >= 1.
        key: JAX key or seed; members get initial parameters of their own.
        num_epochs: largest number of passes, >= 1.
        validation: a batch on which the loss decides, after each epoch, which weights of a member
            are its best so far; None keeps the last ones.
        patience: epochs without improvement after which a member is done, >= 1.
        per_member: whether each batch has a leading member axis; otherwise members share them.
        mesh: devices over whose axis `"chain"` the members are spread, see `parallel`.
        specs: how the parameters of one member are sharded, see `parallel.place`.
        directory: where checkpoints are written after an epoch. A training that is found there
            goes on, and a finished one is returned at once: it must have the same arguments.
            Batches are read again up to there, so that those that shuffle come in the same order;
            a list is not.
        checkpoint_minutes: between two checkpoints, >= 0; there is one at the end.
        progress: show a progress bar, if tqdm is installed.

    Returns:
        Parameters of all members, each leaf `[member, ...]`: the best ones by validation loss.
        Ctrl-C ends the training after the epoch and returns what there is, and so does SIGTERM
        without a directory.

    Raises:
        ValueError: an argument out of range, a loss that is not a scalar, no batches, a mesh that
            does not fit, a directory in use or of another model, or a member whose loss never was
            finite.
        KeyboardInterrupt: SIGTERM with a directory, after a checkpoint, so that no chain starts
            from members half trained; a second Ctrl-C.

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
    _check.number("warmstart", "checkpoint_minutes", checkpoint_minutes, ">= 0", lambda x: x >= 0)
    optimizer = optax.with_extra_args_support(optimizer)

    def train_one(member: Members, batch: Any) -> Members:
        loss, grads = jax.value_and_grad(loss_fn)(member.params, batch)
        updates, state = optimizer.update(grads, member.state, member.params, value=loss)
        params = optax.apply_updates(member.params, updates)
        return member._replace(params=params, state=state, loss=loss)

    def judge_one(member: Members, batch: Any) -> Members:
        loss = member.loss if validation is None else loss_fn(member.params, batch)
        better = (loss < member.best_loss) & (member.stale < patience) | (validation is None)
        return member._replace(
            best=_tree.where(better, member.params, member.best),
            best_loss=jnp.where(better, loss, member.best_loss),
            stale=jnp.where(better, 0, member.stale + 1),
        )

    shapes = jax.eval_shape(jax.vmap(init_fn), parallel.split_key(key, num_members))
    own = parallel.shardings(shapes, mesh=mesh, specs=specs)
    initialize = jax.jit(parallel.over_chains(init_fn, mesh=mesh), out_shardings=own)
    params = initialize(parallel.split_key(key, num_members, mesh=mesh))
    unknown = np.full(num_members, np.inf, _tree.dtype(params))
    members = Members(
        params=params,
        state=parallel.init(optimizer, params, mesh=mesh, specs=specs),
        loss=parallel.place(unknown, mesh=mesh),
        best=parallel.place(params, mesh=mesh, specs=specs),
        best_loss=parallel.place(unknown, mesh=mesh),
        stale=parallel.place(np.zeros(num_members, np.int32), mesh=mesh),
    )
    train = parallel.step(train_one, members, mesh=mesh, per_chain=per_member)
    judge = parallel.step(judge_one, members, mesh=mesh)
    in_axes = (0, 0 if per_member else None)
    losses = parallel.over_chains(loss_fn, mesh=mesh, in_axes=in_axes)
    validation_batch = ()
    if validation is not None:
        validation_batch = parallel.place_batch(validation, mesh=mesh)

    def put(batch):
        return parallel.place_batch(batch, mesh=mesh, per_chain=per_member)

    lock = checkpoints = None
    bar = _loop.progress_bar(num_epochs, "warm start", progress)
    epoch, stop, is_killed = 0, False, False
    try:
        if directory is not None:
            lock = Lock("warmstart", Path(directory))
            checkpoints = Checkpoints(Path(directory), checkpoint_minutes)
            if found := checkpoints.restore(members):
                members, epoch = found[0], found[1]["epoch"]
        with _loop.stop_signals() as stop_signal:
            if epoch < num_epochs and not _are_done(members, patience):
                _loop.skip_passes(batches, epoch)
            while epoch < num_epochs and not stop and not _are_done(members, patience):
                num_batches = 0
                for num_batches, batch in enumerate(batches, 1):
                    if epoch == 0 and num_batches == 1:
                        arguments = members.params, batch, put, per_member, num_members
                        _loop.check_loss("warmstart", losses, *arguments)
                    members = train(members, put(batch))
                if not num_batches:
                    rule = "an iterable that yields batches in every epoch, such as a list"
                    _check.fail("warmstart", "batches", rule, f"none in epoch {epoch + 1}")
                members = judge(members, validation_batch)
                epoch += 1
                if bar is not None:
                    loss = np.mean(_tree.local(members.best_loss))
                    bar.set_postfix(refresh=False, loss=f"{loss:.4f}")
                    bar.update(epoch - bar.n)
                due = checkpoints is not None and checkpoints.is_due()
                wish = stop_signal()
                stop, is_killed, due = any_process(wish is not None, wish == "SIGTERM", due)
                if checkpoints is not None and due:
                    checkpoints.save(epoch, members, {"epoch": epoch})
        if checkpoints is not None:
            checkpoints.save(epoch, members, {"epoch": epoch})
            if is_killed:
                raise KeyboardInterrupt(
                    "`warmstart` was stopped by SIGTERM: run it again to go on."
                )
    finally:
        if bar is not None:
            bar.close()
        if checkpoints is not None:
            checkpoints.close()
        if lock is not None:
            lock.release()
    lost = np.flatnonzero(~np.isfinite(_tree.local(members.best_loss))).tolist()
    if lost:
        rule = "one under which every member reaches a finite loss"
        _check.fail("warmstart", "optimizer", rule, f"none for the members {lost}")
    return members.best


def _are_done(members: Members, patience: int) -> bool:
    """Whether no member has got better for so many epochs."""
    (running,) = any_process(bool(np.any(_tree.local(members.stale) < patience)))
    return not running


def chains_from_weights(
    weights: Sequence[optax.Params],
    *,
    num_chains: int | None = None,
    jitter: float = 0.0,
    key: jax.Array | int | None = None,
) -> optax.Params:
    """Start chains from weights that are trained already, such as those of checkpoints.

    Args:
        weights: parameter trees of one network each, all alike.
        num_chains: chain i starts from `weights[i % len(weights)]`; None: one chain for each.
        jitter: standard deviation of Gaussian noise in units of the root mean square of each
            array, >= 0. Chains from the same weights that share batches and draw no noise of their
            own stay together unless they start apart.
        key: JAX key or seed, needed for a jitter.

    Returns:
        Parameters `[chain, ...]` for `sample`.

    Raises:
        ValueError: no weights, trees that differ, an argument out of range, no key.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> chains = optax_smile.chains_from_weights(
        ...     [{"w": jnp.ones(3)}], num_chains=4, jitter=0.01, key=jax.random.key(0)
        ... )
        >>> chains["w"].shape
        (4, 3)
    """
    where = "chains_from_weights"
    if not isinstance(weights, (list, tuple)) or not weights:
        _check.fail(where, "weights", "a list of at least one parameter tree", repr(weights)[:80])
    for tree in weights[1:]:
        _tree.check_alike(where, "weights", tree, weights[0], "the first tree")
    num_chains = len(weights) if num_chains is None else num_chains
    _check.whole(where, "num_chains", num_chains, 1)
    _check.number(where, "jitter", jitter, ">= 0 and finite", lambda x: 0 <= x < float("inf"))
    chosen = [weights[chain % len(weights)] for chain in range(num_chains)]
    chains = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *chosen)
    if not jitter:
        return chains
    drawn = _check.key(where, key)
    if drawn is None:
        _check.fail(where, "key", "a JAX key for a jitter", None)

    def disturb(x, noise):
        axes = tuple(range(1, x.ndim))
        return x + jitter * jnp.sqrt(jnp.mean(x**2, axis=axes, keepdims=True)) * noise

    return jax.tree.map(disturb, chains, _tree.normal_like(drawn, chains))
