"""Starts of chains: train a deep ensemble, or take trained weights."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _check_trees, _noise, _on_host, _settings, _tree, parallel
from optax_smile._bar import Bar
from optax_smile._types import Options, T
from optax_smile._warn import warn
from optax_smile.chains import _directory, _host
from optax_smile.mistakes.batches import advice_on_single, is_finite
from optax_smile.mistakes.gradients import keep_finite, listed
from optax_smile.mistakes.loss import FullLoss, Losses, loss_of, warn_of_sum
from optax_smile.mistakes.start import AUX, SEED

# Jitter relative to the size of the weights, see `chains_from_weights`. It changes the LPPD of
# trained networks by about .01 nats, at most .05 (energy, concrete, diabetes); a jitter of 0.1
# changes it by up to 2.
JITTER = 0.01
KEPT = "It keeps its last finite numbers. Are there batches of one example?"
INIT_RULE = "a function of (key) that returns floating-point parameters"


class Members(NamedTuple):
    """State of the training, every leaf `[member, ...]`."""

    params: optax.Params  # Parameters after the last step.
    state: optax.OptState  # State of the optimizer.
    aux: object  # Auxiliary state of the model, or None.
    key: jax.Array | None  # Key of a stochastic loss.
    loss: jax.Array  # Loss of the last batch.
    best: Any  # Parameters and auxiliary state with the smallest validation loss so far.
    best_loss: jax.Array  # The loss of `best`.
    stale: jax.Array  # Epochs since `best`, int32.
    num_lost: jax.Array | None  # Steps that made an array of `aux` non-finite, `[member, array]`.


Step: TypeAlias = Callable[[Members, object], Members]


@_check.arguments(
    init_fn=_check.Function("(key)", "For Flax: `lambda key: model.init(key, x)`.", INIT_RULE),
    batches=_check.BATCHES,
    optimizer=_check.TRANSFORMATION,
    num_members=_check.Whole(1),
    key=_check.Key(needed=True),
    num_epochs=_check.Whole(1),
    steps_per_epoch=_check.Whole(1) | None,
    patience=_check.Whole(1),
    aux=AUX | None,
    mesh=parallel.MESH,
    specs=parallel.SPECS,
    directory=_check.PathLike() | None,
    checkpoint_minutes=_check.Real(0, infinite=True, traced=False),
)
@_check.on_host
def warmstart(
    loss_fn: Callable[..., object],
    init_fn: Callable[[jax.Array], optax.Params],
    batches: Iterable[object],
    optimizer: optax.GradientTransformation,
    *,
    num_members: int,
    key: jax.Array | int,
    num_epochs: int = 100,
    steps_per_epoch: int | None = None,
    validation: object = None,
    patience: int = 10,
    aux: object = None,
    stochastic: bool = False,
    mesh: Mesh | None = None,
    specs: object = None,
    directory: str | os.PathLike[str] | None = None,
    check: bool = True,
    checkpoint_minutes: float = 5.0,
    progress: bool = True,
) -> Any:
    """Train the members of a deep ensemble in parallel, each with its own early stopping.

    Args:
        loss_fn, aux, stochastic, mesh, specs, progress: as for `sample`, with members in place of
            chains.
        init_fn: `init_fn(key)` returns the initial parameters of a member.
        batches: iterable of batches. `warmstart` iterates over it once per epoch. Each new batch
            shape causes a compilation.
        steps_per_epoch: batches per epoch, >= 1, for a loader that never ends: the next epoch goes
            on where the last one stopped. None: all.
        optimizer: any Optax optimizer whose `update` needs no extra argument except `value` (L-BFGS
            needs more). Its schedules advance with every batch.
        num_members: number of members, >= 1.
        key: JAX key or seed; each member gets its own initial parameters.
        num_epochs: largest number of epochs, >= 1.
        validation: a batch. `warmstart` computes the loss of each member on it after each epoch,
            with the same key if it is `stochastic`, and returns the weights with the smallest loss.
            None: it returns the last weights.
        patience: >= 1. A member is finished after this many epochs in a row without a smaller
            validation loss. The training ends when all members are finished.
        directory: directory for checkpoints, which are written at the end of epochs. A call with
            the same directory resumes the training, or returns at once if it is finished. Only
            `num_epochs` may change; what the loss and the optimizer compute is not compared. If
            `batches` is not a list or tuple, a resumed call first iterates over it once for each
            finished epoch, which restores the order of batches that are shuffled with a fixed seed.
        check: test the loss on the first batch, unless it is `stochastic`, and warn if it looks
            like a sum over the examples. Warn of members with equal initial parameters.
        checkpoint_minutes: smallest number of minutes between checkpoints, >= 0. One is always
            written at the end.

    Returns:
        Parameters of all members, each leaf `[member, ...]`: for each member the weights with the
        smallest validation loss, or the last weights without `validation`. With `aux`: `{"params":
        ..., "aux": ...}`. After Ctrl-C, and without a directory after SIGTERM, `warmstart`
        completes the current epoch, warns, and returns the members so far.

    Raises:
        ValueError: an argument is out of range, the loss is not a scalar, there are no batches, the
            mesh is invalid, the directory is in use or holds another training, or the loss of a
            member was never finite.
        KeyboardInterrupt: a second Ctrl-C ended the training, at once and without a new checkpoint;
            or, with a directory, SIGTERM, after the current epoch and a checkpoint.

    Cost: one gradient per member and batch, and one validation loss per epoch; memory for a second
    copy of the parameters.

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

    Source: deep ensembles: Lakshminarayanan et al. 2017; their use as starts of the chains of
    `sample`: Sommer et al. 2024.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    validation = _on_host.as_numeric("validation", validation, copy=True)
    loss = loss_of(loss_fn, aux is not None, stochastic)
    # The argument check has converted a seed to a typed key.
    typed = cast(jax.Array, key)
    members = _begin(init_fn, optimizer, num_members, typed, stochastic, aux, mesh, specs)
    _check_start(members, optimizer, check)
    given = optimizer, batches, steps_per_epoch, validation, num_epochs, patience, check, mesh
    training = _Training(members, loss, *given)
    same: Options = {"stochastic": stochastic, "num_members": num_members, "patience": patience}
    same["key"] = np.asarray(jax.random.key_data(typed)).tolist()
    same["validation"] = None if validation is None else str(jax.tree.map(np.shape, validation))
    same["batches"] = _directory.describe_batches(batches)
    same["steps_per_epoch"] = steps_per_epoch
    with ExitStack() as closing:
        if directory is not None:
            closing.enter_context(_directory.lock(Path(directory)))
            training.restore(Path(directory), checkpoint_minutes, same)
        bar = closing.enter_context(Bar(num_epochs, "warm start", progress))
        stop_requested = closing.enter_context(_host.stop_signals())
        if training.epoch and training.is_done():
            what = f"Its {num_members} members, trained for {training.epoch} epochs, are returned."
            warn(f"`warmstart`: the training in {directory} is finished. {what}")
        else:
            training.skip_epochs()
        signal = training.run(bar, stop_requested)
    if signal:
        # The members may be half trained.
        epochs = f"{training.epoch} of at most {num_epochs} epochs"
        message = _directory.stopped(signal, epochs, directory)
        if signal == "SIGTERM" and directory is not None:
            raise KeyboardInterrupt(message)
        warn(message)
    return _best(training.members)


def _check_start(members: Members, optimizer: optax.GradientTransformationExtraArgs, check: bool):
    """Warn if the optimizer is a sampler, and if members have the same parameters."""
    shapes = _on_host.shapes_of_one(members.params)
    if _settings.of(optimizer, shapes) is not None:
        warn("`warmstart`: `optimizer` is a sampler, which gives draws. Pass it to `sample`.")
    elif check and members.key is None:
        first = _on_host.first_alike(_on_host.local(members.params))
        if copies := [member for member, like in enumerate(first) if first.count(like) > 1]:
            what = f"the same parameters for members {copies}. Does it use its key?"
            warn(f"`warmstart`: `init_fn` returned {what}")


def _best(members: Members) -> Any:
    """Return the best weights; each member must have had a finite loss."""
    lost = np.flatnonzero(~np.isfinite(_on_host.local(members.best_loss))).tolist()
    if lost:
        rule, got = "finite for every member after some epoch", f"never so for the members {lost}"
        advice = "Are the batches and `validation` finite? Try a smaller learning rate."
        _check.fail("loss_fn", rule, got, advice)
    if members.num_lost is not None and np.any(lost := _on_host.local(members.num_lost)):
        at = listed(members.aux, np.any(lost, axis=0))
        warn(f"`warmstart`: `aux` was not finite at {at} after {np.max(lost)} steps. {KEPT}")
    return members.best["params"] if members.aux is None else members.best


@dataclasses.dataclass
class _Training:
    """Members after `epoch` epochs, and the functions and data that train them."""

    members: Members
    loss: FullLoss
    optimizer: optax.GradientTransformationExtraArgs
    batches: Iterable[object]
    steps_per_epoch: int | None
    validation: object
    num_epochs: int
    patience: int
    check: bool
    mesh: Mesh | None
    checkpoints: _directory.Checkpoints | None = None
    epoch: int = 0
    first_epoch: int = 0  # First epoch of this call.

    def __post_init__(self):
        mesh, members, validation = self.mesh, self.members, self.validation
        steps = _steps(self.loss, self.optimizer, self.patience, validation is None)
        self.train, self.validate = (parallel.step(step, members, mesh=mesh) for step in steps)
        with _check.called("warmstart", "parallel.place_batch", batch="validation"):
            held_out = () if validation is None else parallel.place_batch(validation, mesh=mesh)
        like, hint = _on_host.shapes_of_one(members), advice_on_single(self.batches)
        number, self.held_out = len(members.stale), held_out
        self.losses = Losses(self.loss, like, number, mesh=mesh, hint=hint)
        self.stream = None if self.steps_per_epoch is None else _host.Stream(self.batches)

    def restore(self, folder: Path, minutes: float, same: Options):
        """Write checkpoints to a folder, and resume from the newest with the `same` settings."""
        self.checkpoints, self.same = _directory.Checkpoints(folder, minutes, "warmstart"), same
        if place := self.checkpoints.place():
            _directory.check_settings(folder, place["run"], same)
        if restored := self.checkpoints.restore(self.members):
            self.members, self.epoch = restored[0], restored[1]["epoch"]
        self.first_epoch = self.epoch

    def is_done(self) -> bool:
        """Return whether all epochs are made, or no member has improved for `patience` epochs."""
        if self.epoch >= self.num_epochs:
            return True
        runs = bool(np.any(_on_host.local(self.members.stale) < self.patience))
        return not any(_host.any_process(runs))

    def _take(self, number: int) -> Iterable[object]:
        """Return the batches of a number of epochs."""
        if self.stream is None:
            return chain.from_iterable(self.batches for _ in range(number))
        return islice(self.stream, number * cast(int, self.steps_per_epoch))

    def skip_epochs(self):
        """Skip the batches of earlier epochs, so that a shuffled pass has the right order."""
        # All passes over a list are equal.
        if self.stream is not None or not isinstance(self.batches, Sequence):
            collections.deque(self._take(self.epoch), maxlen=0)

    def run(self, bar: Bar, stop_requested: Callable[[], str | None]) -> str | None:
        """Train to the end, or after a signal to the end of the epoch, and return the signal."""
        signal = None
        while not signal and not self.is_done():
            self._run_epoch(bar)
            is_due = self.checkpoints is not None and self.checkpoints.is_due()
            signal, is_due = _host.agree(stop_requested(), is_due)
            if is_due:
                self._save()
        if self.epoch < self.num_epochs and not signal:
            bar.end("no smaller validation loss")
        self._save()
        return signal

    def _run_epoch(self, bar: Bar):
        """Train for an epoch, and compute the validation loss."""
        number, copies = 0, not isinstance(self.batches, (list, tuple))
        for number, given in enumerate(self._take(1), 1):
            batch = _on_host.as_numeric("batches", given, copy=copies)
            if number == 1 and self.epoch == 0:
                self._check_losses(batch)
            self.members = self.train(self.members, self.losses.put(batch))
            if number == 1 and self.epoch == self.first_epoch:
                bar.show(self.epoch)
        self.epoch += 1
        if not number:
            rule = "an iterable that yields batches in every epoch, such as a list"
            _check.fail("batches", rule, f"none in epoch {self.epoch}")
        self.members = self.validate(self.members, self.held_out)
        loss = np.mean(_on_host.local(self.members.best_loss))
        bar.show(self.epoch, loss=f"{loss:.4f}")

    def _save(self):
        """Write a checkpoint if there is a folder for it."""
        if self.checkpoints is not None:
            self.checkpoints.save(self.epoch, self.members, {"epoch": self.epoch, "run": self.same})

    def _check_losses(self, batch: object):
        """Check the losses of the first batch and of the validation."""
        self.losses.check(self.members, batch)
        if self.check and self.members.key is None:
            warn_of_sum(self.losses, self.members, batch)
        if self.validation is not None:
            self.losses.check(self.members, self.validation, "validation")
            # A loss may ignore missing numbers.
            if not is_finite(self.validation) and not np.any(
                np.isfinite(self.losses(self.members, self.validation))
            ):
                _check.fail("validation", "finite", "nan or inf")


@_check.called("warmstart", "parallel.place", "parallel.init", tree="params", sampler="optimizer")
def _begin(
    init_fn: Callable[[jax.Array], optax.Params],
    optimizer: optax.GradientTransformationExtraArgs,
    num_members: int,
    key: jax.Array,
    stochastic: bool,
    aux: object,
    mesh: Mesh | None,
    specs: object,
) -> Members:
    """Initialize the members, each on its row of devices."""
    key, loss_key = parallel._loss_keys(key, stochastic, num_members, mesh=mesh)
    if aux is not None and parallel.num_chains(aux, "aux") != num_members:
        rule = f"a tree whose leaves have a leading axis of {num_members} members"
        _check.fail("aux", rule, jax.tree.map(jnp.shape, aux))
    parallel.check_mesh(mesh, num_members)
    # A key for optimizers with noise, distinct from those of the initial parameters.
    state_key = jax.random.fold_in(key, num_members)
    keys = parallel._split_key(key, num_members, mesh=mesh)
    like = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    shapes = _check.traced("init_fn", jax.vmap(init_fn), like, rule=INIT_RULE)
    dtypes = [x.dtype for x in jax.tree.leaves(shapes)]
    if not dtypes or not all(jnp.issubdtype(x, jnp.inexact) for x in dtypes):
        _check.fail("init_fn", INIT_RULE, f"one that returns {_check.cut(shapes)}")
    own = parallel._shardings(shapes, mesh, specs, "params")
    params = jax.jit(parallel.over_chains(init_fn, mesh=mesh), out_shardings=own)(keys)
    unknown, arrays = np.full(num_members, np.inf, _tree.dtype(params)), len(jax.tree.leaves(aux))

    def copy(tree: object) -> Any:
        return None if tree is None else parallel.place(tree, mesh=mesh)

    return Members(
        params=params,
        state=parallel.init(optimizer, params, mesh=mesh, specs=specs, key=state_key),
        aux=copy(aux),
        key=loss_key,
        loss=copy(unknown),
        best={"params": parallel.place(params, mesh=mesh, specs=specs), "aux": copy(aux)},
        best_loss=copy(unknown),
        stale=copy(np.zeros(num_members, np.int32)),
        num_lost=copy(np.zeros((num_members, arrays), np.int32) if arrays else None),
    )


def _steps(
    loss: FullLoss,
    optimizer: optax.GradientTransformationExtraArgs,
    patience: int,
    keeps_last: bool,
) -> tuple[Step, Step]:
    """Return the training step of one member, and its validation step after an epoch."""

    def train(member: Members, batch: object) -> Members:
        key, used = _noise.split(member.key)
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        (value, aux), grads = value_and_grad(member.params, member.aux, used, batch)
        updates, state = optimizer.update(grads, member.state, member.params, value=value)
        params = optax.apply_updates(member.params, updates)
        aux, are_lost = keep_finite(aux, member.aux, value)
        lost = member.num_lost
        lost = lost if are_lost is None or lost is None else _tree.count(lost, are_lost)
        member = member._replace(params=params, state=state, aux=aux, num_lost=lost)
        return member._replace(key=key, loss=value)

    def validate(member: Members, batch: object) -> Members:
        value = member.loss
        if not keeps_last:
            # With another key, the loss would change even if the weights did not.
            kind = None if member.key is None else jax.random.key_impl(member.key)
            used = None if kind is None else jax.random.key(SEED, impl=kind)
            value, _ = loss(member.params, member.aux, used, batch)
        better = (value < member.best_loss) & (member.stale < patience) | keeps_last
        now = {"params": member.params, "aux": member.aux}
        return member._replace(
            best=optax.tree.where(better, now, member.best),
            best_loss=jnp.where(better, value, member.best_loss),
            stale=jnp.where(better, 0, member.stale + 1),
        )

    return train, validate


WEIGHTS = _check.kind((list, tuple), "a list of at least one parameter tree")


@_check.arguments(
    weights=WEIGHTS,
    num_chains=_check.Whole(1) | None,
    jitter=_check.Real(0, traced=False) | None,
    key=_check.Key(),
)
def chains_from_weights(
    weights: Sequence[T],
    *,
    num_chains: int | None = None,
    jitter: float | None = None,
    key: jax.Array | int | None = None,
) -> T:
    """Start chains from trained weights, such as checkpoints.

    Args:
        weights: parameter trees of one network each, with equal structure and shapes.
        num_chains: >= 1, at least the number of weights: chain i starts from
            `weights[i % len(weights)]`; None: one chain per tree of weights.
        jitter: standard deviation of Gaussian noise, relative to the root mean square of each
            array, >= 0. Arrays of zeros get no noise, unless all arrays are zero: then the unit is
            1. None: 0.01 if two chains would start from equal weights, else 0.
        key: JAX key or seed, required for a jitter.

    Returns:
        Parameters `[chain, ...]` for `sample`.

    Raises:
        ValueError: no weights, trees that differ, fewer chains than weights, an argument out of
            range, or no key for a jitter.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> chains = optax_smile.chains_from_weights(
        ...     [{"w": jnp.ones(3)}], num_chains=4, key=jax.random.key(0)
        ... )
        >>> chains["w"].shape
        (4, 3)
    """
    if not jax.tree.leaves(weights[:1]):
        _check.fail("weights", WEIGHTS.text, "trees with no arrays" if weights else "an empty list")
    _check.Tree(WEIGHTS.text, finite=True)("weights", weights)
    for tree in weights[1:]:
        _check_trees.check_alike("weights", tree, weights[0], "the first tree")
    for leaf in jax.tree.leaves(weights[0]):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            _check.fail("weights", "floating-point parameters", jnp.result_type(leaf))
    num_chains = len(weights) if num_chains is None else num_chains
    if num_chains < len(weights):
        rule = f"at least {len(weights)}, the number of `weights`"
        _check.fail("num_chains", rule, num_chains, "Or pass fewer weights.")
    chosen = [weights[chain % len(weights)] for chain in range(num_chains)]
    chains = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *chosen)
    if jitter is None:
        jitter = JITTER if len(set(_on_host.first_alike(chains))) < num_chains else 0
    if not jitter:
        return chains
    purpose = "for the jitter that separates chains with equal initial weights"
    drawn = _check.Key(True, purpose)("key", key)

    def disturb(chain, noise):
        sizes = jax.tree.map(lambda x: jnp.sqrt(jnp.mean(x**2)), chain)
        are_zero = jnp.all(jnp.stack([size == 0 for size in jax.tree.leaves(sizes)]))
        units = jax.tree.map(lambda size: jnp.where(are_zero, 1, size), sizes)
        return jax.tree.map(lambda x, unit, y: x + jitter * unit * y, chain, units, noise)

    return jax.vmap(disturb)(chains, _noise.normal_like(drawn, chains))
