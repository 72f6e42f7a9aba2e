"""Train a deep ensemble, from whose members the chains start."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _settings, _tree, parallel
from optax_smile.chains import _identity, _loop
from optax_smile.chains._checkpoint import Checkpoints, any_process, lock
from optax_smile.draws import _format

# Functions whose errors are reported as those of `warmstart`.
PARTS = "parallel.shardings", "parallel.place", "parallel.init", "parallel.split_key"
OF_VALIDATION = {"loss_fn": "validation", "batches": "validation"}


class Members(NamedTuple):
    """State of the training, every leaf `[member, ...]`.

    Attributes:
        params: parameters after the last step.
        state: state of the optimizer.
        aux: auxiliary state of the model, or None.
        key: key of a stochastic loss, or None.
        loss: loss of the last batch.
        best: parameters with the smallest validation loss so far, and their auxiliary state.
        best_loss: the smallest validation loss.
        stale: epochs since the smallest validation loss, int32.
    """

    params: Any
    state: Any
    aux: Any
    key: jax.Array | None
    loss: jax.Array
    best: Any
    best_loss: jax.Array
    stale: jax.Array


@_check.arguments(
    init_fn=_check.Function("(key)"),
    batches=_check.BATCHES,
    optimizer=_check.TRANSFORMATION,
    num_members=_check.Whole(1),
    key=_check.Key(needed=True),
    num_epochs=_check.Whole(1),
    validation=_check.Tree(traced=False),
    patience=_check.Whole(1),
    aux=parallel.STACKED | None,
    stochastic=_check.FLAG,
    loss_fn=_loop.Loss(),
    per_member=_check.FLAG,
    mesh=parallel.MESH,
    specs=parallel.SPECS,
    directory=_check.PathLike() | None,
    accept=_identity.ACCEPT,
    check=_check.FLAG,
    checkpoint_minutes=_check.Real(0, infinite=True, traced=False),
    progress=_check.FLAG,
)
def warmstart(
    loss_fn: Callable[..., Any],
    init_fn: Callable[[jax.Array], optax.Params],
    batches: Iterable[Any],
    optimizer: optax.GradientTransformation,
    *,
    num_members: int,
    key: jax.Array | int,
    num_epochs: int = 100,
    validation: Any = None,
    patience: int = 10,
    aux: Any = None,
    stochastic: bool = False,
    per_member: bool = False,
    mesh: Mesh | None = None,
    specs: Any = None,
    directory: str | os.PathLike[str] | None = None,
    accept: Sequence[_identity.Accepted] = (),
    check: bool = True,
    checkpoint_minutes: float = 5.0,
    progress: bool = True,
) -> optax.Params:
    """Train the members of a deep ensemble in parallel, each with its own early stopping.

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, a scalar without the prior. With `aux` it is
            called with `aux=` and returns `(loss, new_aux)`; if `stochastic` it gets `key=`.
        init_fn: `init_fn(key)` returns the initial parameters of a member.
        batches: iterable of batches, restarted for each epoch. Batches of equal shape compile only
            once.
        optimizer: any Optax optimizer; schedules count its steps.
        num_members: number of members, >= 1.
        key: JAX key or seed; each member gets its own initial parameters.
        num_epochs: largest number of epochs, >= 1.
        validation: a batch; after each epoch a member keeps its weights if their loss on this batch
            is the smallest so far. None: keep the last weights.
        patience: epochs without improvement after which a member stops, >= 1.
        aux: initial auxiliary state of the model, such as running means of BatchNorm, each leaf
            `[member, ...]`.
        stochastic: whether the loss draws random numbers, such as dropout: it gets a new key at
            each step and for each validation.
        per_member: whether each batch has a leading member axis; otherwise members share batches.
        mesh: devices; members are spread over the axis `"chain"`, see `parallel`.
        specs: how the parameters of one member are sharded, see `parallel.place`.
        directory: directory for checkpoints, written after an epoch. A call with the same directory
            resumes the training, or returns at once if it is finished. The arguments must be the
            same, except `num_epochs`; so must data and loss if `batches` is a list or a tuple, see
            `sample`. On resume, other iterables are read up to the checkpoint, to reproduce the
            order of shuffled batches.
        accept: what may differ nevertheless on resume, `"data"` and `"loss"`.
        check: warn, from the first batch, of a loss that looks like a sum over the examples.
        checkpoint_minutes: minutes between checkpoints, >= 0; the end always writes one.
        progress: show a progress bar, if tqdm is installed.

    Returns:
        Parameters of all members, each leaf `[member, ...]`: those with the smallest validation
        loss; with `aux` `{"params": ..., "aux": ...}`.
        Ctrl-C ends the training after the current epoch, with a warning, and returns the members so
        far. So does SIGTERM without a directory.

    Raises:
        ValueError: an argument out of range, a loss that is not a scalar, no batches, an invalid
            mesh, a directory in use or of another training, or a member whose loss was never
            finite.
        KeyboardInterrupt: SIGTERM with a directory, after a checkpoint, so that no chain starts
            from half-trained members; a second Ctrl-C.

    Cost: one gradient per member and batch; memory for a second copy of the parameters.

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
    optimizer = optax.with_extra_args_support(optimizer)
    loss = _loop.loss_of("warmstart", loss_fn, aux is not None, stochastic)
    # The argument check has converted a seed to a typed key.
    typed: Any = key
    key, loss_key = jax.random.split(typed) if stochastic else (typed, None)
    members = _begin(init_fn, optimizer, num_members, key, loss_key, aux, mesh=mesh, specs=specs)
    train_one, judge_one = _steps(loss, optimizer, patience, validation is None)
    train = parallel.step(train_one, members, mesh=mesh, per_chain=per_member)
    judge = parallel.step(judge_one, members, mesh=mesh)
    held_out = () if validation is None else parallel.place_batch(validation, mesh=mesh)
    losses = _Losses(loss, num_members, per_member, mesh)
    epoch, is_stopped, is_killed, checkpoints, identity = 0, False, False, None, {}
    with ExitStack() as closing:
        if directory is not None:
            own = {"stochastic": stochastic, "per_member": per_member}
            own |= {"num_members": num_members, "patience": patience}
            identity = _describe(own, typed, optimizer, batches, validation, losses, members)
            checkpoints = _open(
                Path(directory), checkpoint_minutes, closing, identity, accept, members
            )
            if restored := checkpoints.restore(members):
                members, epoch = restored[0], restored[1]["epoch"]
        bar = closing.enter_context(_loop.Bar(num_epochs, "warm start", progress, compiles=True))
        stop_requested = closing.enter_context(_loop.stop_signals())
        if epoch < num_epochs and not _are_done(members, patience):
            _loop.skip_passes(batches, epoch)
        elif epoch:
            _warn_of_end(num_members, epoch, directory)
        while epoch < num_epochs and not is_stopped and not _are_done(members, patience):
            num_batches = 0
            for num_batches, batch in enumerate(batches, 1):
                if epoch == 0 and num_batches == 1:
                    losses.check(members, batch, check and not stochastic)
                    if validation is not None:
                        with _check.called("warmstart", "warmstart", **OF_VALIDATION):
                            losses.of_shared().check(members, validation, False)
                members = train(members, losses.put(batch))
                bar.begin()
            epoch += 1
            if not num_batches:
                rule = "an iterable that yields batches in every epoch, such as a list"
                _check.fail("warmstart", "batches", rule, f"none in epoch {epoch}")
            members = judge(members, held_out)
            bar.show(epoch, loss=f"{np.mean(_tree.local(members.best_loss)):.4f}")
            due = checkpoints is not None and checkpoints.is_due()
            signal = stop_requested()
            is_stopped, is_killed, due = any_process(signal is not None, signal == "SIGTERM", due)
            if checkpoints is not None and due:
                checkpoints.save(epoch, members, {"epoch": epoch, "run": identity})
        if checkpoints is not None:
            checkpoints.save(epoch, members, {"epoch": epoch, "run": identity})
            if is_killed:
                raise KeyboardInterrupt(
                    "`warmstart` was stopped by SIGTERM. Repeat the call to resume."
                )
    if is_stopped:
        _warn_of_stop(epoch, num_epochs, directory)
    _check_finite(members)
    return members.best["params"] if aux is None else members.best


def _check_finite(members: Members):
    """Require a finite loss of every member."""
    lost = np.flatnonzero(~np.isfinite(_tree.local(members.best_loss))).tolist()
    if lost:
        rule = "an optimizer with which every member reaches a finite loss"
        remedy = "Are the batches and the validation finite?"
        _check.fail("warmstart", "optimizer", rule, f"none for the members {lost}", remedy)


def _warn_of_end(num_members: int, epoch: int, directory: Any):
    """Warn that the training is already finished."""
    message = f"{num_members} members of {epoch} epochs loaded from {directory};"
    warnings.warn(f"`warmstart`: {message} the training is finished.", stacklevel=3)


def _warn_of_stop(epoch: int, num_epochs: int, directory: Any):
    """Warn that the members may be half trained."""
    message = f"`warmstart` was stopped after {epoch} of at most {num_epochs} epochs."
    if directory is not None:
        message += f" A checkpoint is in {directory}; repeat the call to resume."
    warnings.warn(message, stacklevel=3)


class _Losses:
    """The loss of each member on a batch."""

    def __init__(self, loss: Callable, number: int, per_member: bool, mesh: Mesh | None):
        self.loss, self.number, self.per_member, self.mesh = loss, number, per_member, mesh

        def of_member(member, batch):
            return loss(member.params, member.aux, member.key, batch)[0]

        in_axes = 0, 0 if per_member else None
        self.compiled = jax.jit(parallel.over_chains(of_member, mesh=mesh, in_axes=in_axes))

    def of_shared(self) -> _Losses:
        """Return the losses for a batch that all members share."""
        return _Losses(self.loss, self.number, False, self.mesh) if self.per_member else self

    def put(self, batch: Any) -> Any:
        """Put a batch on the devices."""
        if self.mesh is None:
            return batch
        return parallel.place_batch(batch, mesh=self.mesh, per_chain=self.per_member)

    def check(self, members: Members, batch: Any, warns: bool):
        """Require a scalar loss per member; optionally warn of a loss that looks like a sum."""
        arguments = self.compiled, members, batch, self.put, self.per_member, self.number
        _loop.check_loss("warmstart", *arguments)
        if warns:
            losses = partial(self, members)
            _loop.warn_of_sum("warmstart", losses, batch, self.per_member, self.mesh)

    def __call__(self, members: Members, batch: Any) -> jax.Array:
        """Compute the losses `[member]`."""
        self.check(members, batch, False)
        return self.compiled(members, self.put(batch))


def _describe(
    arguments: dict[str, Any],
    key: jax.Array,
    optimizer: optax.GradientTransformation,
    batches: Any,
    validation: Any,
    losses: _Losses,
    members: Members,
) -> dict[str, Any]:
    """Return what identifies this training."""
    words = np.asarray(jax.random.key_data(key)).tolist()
    own = {"key": words, "optimizer": _settings.checksum(optimizer)}
    data = _identity.of_batches(batches, losses.per_member)
    return {
        "arguments": arguments | own | {"validation": validation is not None},
        "versions": _format.versions(),
        "validation": _identity.of_batches([validation], False).told,
        **_identity.of_run(data, partial(losses, members)),
    }


def _open(
    directory: Path,
    minutes: float,
    closing: ExitStack,
    identity: dict[str, Any],
    accept: Sequence[_identity.Accepted],
    members: Members,
) -> Checkpoints:
    """Lock the directory, and require that it does not hold another training."""
    closing.enter_context(lock("warmstart", directory))
    checkpoints = Checkpoints(directory, minutes)
    closing.callback(checkpoints.close)
    checkpoints.check_format("warmstart", members)
    before = checkpoints.place()
    if before is not None:
        _check_same(directory, before["run"], identity, accept)
    return checkpoints


def _check_same(
    directory: Path, before: Any, now: dict[str, Any], accept: Sequence[_identity.Accepted]
):
    """Require that the directory holds this training."""
    theirs = before["arguments"]
    for name, mine in now["arguments"].items():
        # Names inside an optimizer may change with Optax's version.
        is_compared = name != "optimizer" or before["versions"] == now["versions"]
        if is_compared and mine != theirs.get(name):
            was = repr(theirs.get(name))
            rule = f"the same as in the training in {directory}, whose {name} is {was}"
            remedy = "Choose another directory, or pass the arguments of that training."
            _check.fail("warmstart", name, rule, repr(mine), remedy)
    _identity.check_same("warmstart", directory, before, now, accept)


@_check.called("warmstart", *PARTS, tree="params", sampler="optimizer")
def _begin(
    init_fn: Callable[[jax.Array], optax.Params],
    optimizer: optax.GradientTransformationExtraArgs,
    num_members: int,
    key: Any,
    loss_key: jax.Array | None,
    aux: Any,
    *,
    mesh: Mesh | None,
    specs: Any,
) -> Members:
    """Make the members before the first step, each on its row of devices."""
    if aux is not None and parallel.num_chains("warmstart", aux, "aux") != num_members:
        rule = f"a tree whose leaves have a leading axis of {num_members} members"
        _check.fail("warmstart", "aux", rule, jax.tree.map(jnp.shape, aux))
    parallel.check_mesh("warmstart", mesh, num_members)
    rule = "a function that returns parameters, a tree of arrays"
    keys = parallel.split_key(key, num_members)
    shapes = _check.traced("warmstart", "init_fn", jax.vmap(init_fn), keys, rule=rule)
    if not jax.tree.leaves(shapes):
        _check.fail("warmstart", "init_fn", rule, f"one that returns {shapes}")
    if others := [x for x in jax.tree.leaves(shapes) if not jnp.issubdtype(x.dtype, jnp.inexact)]:
        rule = "a function that returns floating-point parameters"
        _check.fail("warmstart", "init_fn", rule, f"one that returns {others[0].dtype}")
    own = parallel.shardings(shapes, mesh=mesh, specs=specs)
    initialize = jax.jit(parallel.over_chains(init_fn, mesh=mesh), out_shardings=own)
    params = initialize(parallel.split_key(key, num_members, mesh=mesh))
    unknown = np.full(num_members, np.inf, _tree.dtype(params))

    def copy_of_aux():
        return None if aux is None else parallel.place(aux, mesh=mesh)

    return Members(
        params=params,
        # Fold in 1 so that an optimizer with noise has another key than the initial parameters.
        state=parallel.init(
            optimizer, params, mesh=mesh, specs=specs, key=jax.random.fold_in(key, 1)
        ),
        aux=copy_of_aux(),
        key=None if loss_key is None else parallel.split_key(loss_key, num_members, mesh=mesh),
        loss=parallel.place(unknown, mesh=mesh),
        best={
            "params": parallel.place(params, mesh=mesh, specs=specs),
            "aux": copy_of_aux(),
        },
        best_loss=parallel.place(unknown, mesh=mesh),
        stale=parallel.place(np.zeros(num_members, np.int32), mesh=mesh),
    )


def _steps(
    loss: Callable[..., tuple[jax.Array, Any]],
    optimizer: optax.GradientTransformationExtraArgs,
    patience: int,
    keeps_last: bool,
) -> tuple[Callable[[Members, Any], Members], Callable[[Members, Any], Members]]:
    """Return the training step of one member, and its validation step after an epoch."""

    def train(member: Members, batch: Any) -> Members:
        key, used = (None, None) if member.key is None else jax.random.split(member.key)
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        (value, aux), grads = value_and_grad(member.params, member.aux, used, batch)
        updates, state = optimizer.update(grads, member.state, member.params, value=value)
        params = optax.apply_updates(member.params, updates)
        return member._replace(params=params, state=state, aux=aux, key=key, loss=value)

    def judge(member: Members, batch: Any) -> Members:
        value = member.loss
        if not keeps_last:
            value, _ = loss(member.params, member.aux, member.key, batch)
        better = (value < member.best_loss) & (member.stale < patience) | keeps_last
        now = {"params": member.params, "aux": member.aux}
        return member._replace(
            best=_tree.where(better, now, member.best),
            best_loss=jnp.where(better, value, member.best_loss),
            stale=jnp.where(better, 0, member.stale + 1),
        )

    return train, judge


def _are_done(members: Members, patience: int) -> bool:
    """Return whether no member has improved for `patience` epochs."""
    (running,) = any_process(bool(np.any(_tree.local(members.stale) < patience)))
    return not running
