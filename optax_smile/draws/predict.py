"""The Bayesian model average: `predict` over snapshots that exist, `Predictor` draw by draw."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from optax_smile import _check, _check_trees, parallel
from optax_smile._types import Options, T
from optax_smile._warn import warn
from optax_smile.draws import _constraints
from optax_smile.draws.likelihoods import Likelihood, Name, are_probabilities, form_of
from optax_smile.draws.prediction import Outcome, Prediction

Per = Literal["chain", "draw"]
Apply = Callable[[Any, Any], object]
EntropyOf = Callable[[jax.Array], jax.Array] | None


@_check.arguments(snapshots=_constraints.SNAPSHOTS)
@_check.on_host
def predict(
    apply_fn: Apply,
    snapshots: Iterable[optax.Params],
    inputs: object,
    *,
    likelihood: Name | Likelihood,
    targets: object = None,
    batch_size: int | None = None,
    per: Per | None = None,
    mesh: Mesh | None = None,
    specs: object = None,
) -> Prediction:
    """Average the predictions of all snapshots (Bayesian model average).

    The predictive density p is the average of the densities p_s of the S snapshots,
    p(y | x) = sum_s p_s(y | x) / S. Its uncertainty is `total` = `aleatoric` + `epistemic`:

    - For class probabilities, `total` is the entropy of p. `aleatoric` is the average entropy of
      the p_s. `epistemic` is the mutual information of target and parameters.
    - For a likelihood with a variance, such as `"gaussian"`, `total` is the variance of p.
      `aleatoric` is the average variance of the p_s. `epistemic` is the variance of their means.

    Args:
        apply_fn: `apply_fn(params, inputs)` returns the outputs of one model for the inputs.
        snapshots: parameter trees: the result of `sample`, `Snapshots.from_members(members)` for a
            deep ensemble, or another iterable, such as a generator. It is iterated over once.
        inputs: finite arrays `[input, ...]`, or data frames or tensors on the host, which become
            arrays. They stay on the device during the call.
        likelihood: how to interpret the outputs and the targets:

            - `"categorical"`: logits `[input, class]`, labels `[input]`.
            - `"bernoulli"`: logits `[input, ...]`, targets 0 or 1 of the same shape.
            - `"gaussian"`: a pair of mean `[input, ...]` and log standard deviation, a scalar or
              an array with the axes of the mean that broadcasts to it; targets of the shape of the
              mean.
            - `"tokens"`: logits `[input, token, class]`, labels `[input, token]`, -1 for padding.
            - your own `Likelihood`.
        targets: observed values, `[input, ...]`, at least one that is not padding.
        batch_size: inputs to run at once, >= 1; None: all.
        per: also return, as `each`, the prediction of each snapshot (`"draw"`), arrays
            `[chain, draw, input, ...]`, or the average over the draws of each chain (`"chain"`),
            `[chain, input, ...]`, in host memory.
        mesh: devices. The axis `"chain"` runs snapshots in parallel, the axis `"data"` shards the
            inputs. None: JAX's default device.
        specs: how the parameters of a snapshot are sharded over other axes of the mesh: a tree of
            `jax.P` like a snapshot. None: not sharded.

    Raises:
        ValueError: no snapshots, or snapshots of different models; predictions that are not finite
            or have a negative variance (the message names the snapshot); outputs, likelihood and
            targets that do not fit together.

    Warns:
        UserWarning: the outputs look like probabilities where logits belong.

    Cost: one forward pass per snapshot. The parameters are first copied to the host. Memory per
    device: the outputs of one snapshot, and three times the size of the average; with
    `per="chain"`, three times the size of the average for each chain on the device.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> apply_fn, draws = (lambda params, x: x @ params), [jnp.eye(2), -jnp.eye(2)]
        >>> optax_smile.predict(apply_fn, draws, jnp.eye(2), likelihood="categorical").mean.tolist()
        [[0.5, 0.5], [0.5, 0.5]]

    Source: entropy and mutual information: Depeweg et al. 2018.
    """
    given: Options = {"likelihood": likelihood, "targets": targets, "batch_size": batch_size}
    given |= {"num_chains": getattr(snapshots, "num_chains", None), "per": per}
    with _check.called("predict", "Predictor", "Predictor.update", params="snapshots"):
        predictor = Predictor(apply_fn, inputs, mesh=mesh, specs=specs, **given)
        for params in snapshots:
            predictor.update(params)
        return predictor.finalize()


class Predictor:
    """Incremental version of `predict`: `update` with each snapshot, `finalize` at any time.

    For loops that do not keep snapshots. Arguments and errors as for `predict`; `num_chains` is the
    number of chains that the snapshots, ordered draw by draw, come from. It is required for `per`,
    and lets errors name a draw.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> apply_fn = lambda params, x: x @ params
        >>> predictor = optax_smile.Predictor(apply_fn, jnp.eye(2), likelihood="categorical")
        >>> predictor.update(jnp.eye(2))
        >>> predictor.update(-jnp.eye(2))
        >>> predictor.finalize().mean.tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """

    @_check.arguments(
        "Predictor",
        apply_fn=_check.Function("(params, inputs)"),
        inputs=_constraints.Inputs(),
        likelihood=_constraints.Reading(),
        targets=_constraints.Targets(),
        batch_size=_check.Whole(1) | None,
        num_chains=_check.Whole(1) | None,
        per=_check.OneOf(Per) | None,
    )
    def __init__(
        self,
        apply_fn: Apply,
        inputs: object,
        *,
        likelihood: Name | Likelihood,
        targets: object = None,
        batch_size: int | None = None,
        num_chains: int | None = None,
        per: Per | None = None,
        mesh: Mesh | None = None,
        specs: object = None,
    ):
        if per is not None and num_chains is None:
            rule = "None for snapshots without `num_chains`"
            remedy = "Make `Snapshots.from_draws(snapshots)`, or pass `num_chains` to `Predictor`."
            _check.fail("per", rule, repr(per), remedy)
        self.num_inputs = len(jax.tree.leaves(inputs)[0])
        parallel.check_mesh(mesh, num_chains if per == "chain" and num_chains else 0)
        self.apply_fn, self.targets = apply_fn, targets
        self.likelihood = cast(Likelihood, likelihood)
        self.mesh, self.specs, self.per, self.num_chains = mesh, specs, per, num_chains
        self._rows = 1 if mesh is None else mesh.shape[parallel.CHAIN]
        self._num_groups = cast(int, num_chains) // self._rows if per == "chain" else 1
        # Snapshot n runs on row n % rows of the devices and is averaged there in group
        # (n // rows) % num_groups. With `per="chain"` each chain has its own row and group.
        self._batches = []
        size = batch_size or self.num_inputs
        for rows in (slice(at, at + size) for at in range(0, self.num_inputs, size)):
            batch = jax.tree.map(operator.itemgetter(rows), (inputs, targets))
            placed = parallel.place_batch(batch, mesh=mesh)
            self._batches.append(jax.tree.map(jnp.asarray, placed))
        self._everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._has_target: np.ndarray | None = None
        self._first: object = None
        # Keyed by the number of inputs of a batch.
        self._adds: dict[int, Callable] = {}
        self.restart()

    @_check.arguments("Predictor.update", params=_constraints.Numeric())
    @_check.on_host
    def update(self, params: optax.Params) -> None:
        """Add one snapshot, a parameter tree like the first one.

        Raises:
            ValueError: another tree, or outputs that do not fit the likelihood or the targets.
        """
        if self._first is None:
            self._first = jax.eval_shape(lambda x: x, params)
            self._require_fit(self._first)
        first = f"the first one (this is {self._name(self.count)})"
        _check_trees.check_alike("params", params, self._first, first)
        # Copy snapshots that have to wait: the caller may modify or donate their arrays.
        self._waiting.append(params if self._rows == 1 else jax.tree.map(np.array, params))
        self.count += 1
        if self.count % self._rows == 0:
            self._evaluate()

    def restart(self) -> None:
        """Discard all snapshots, but keep the compiled programs."""
        self.count: int = 0
        self._waiting: list[object] = []
        self._averages: list[list[Average]] = []
        self._draws: list[Outcome] = []

    @_check.called("Predictor.update")
    @_check.on_host
    def finalize(self) -> Prediction:
        """Return the average over the snapshots so far, a `Prediction`; more may follow.

        Raises:
            ValueError: no snapshots; with `per`, different numbers of draws per chain; predictions
                that are not finite (the message names chain and draw).
        """
        if self.per is not None and self.count % cast(int, self.num_chains):
            rule = f"the same number of draws of each of the {self.num_chains} chains"
            _check.fail("params", rule, f"{self.count} snapshots")
        if not self.count:
            _check.fail("params", "at least one parameter tree", "none")
        if self._waiting:
            self._evaluate()
        batches = [
            self._settled(self._finish(jax.device_put(groups, self._everywhere)))
            for groups in self._averages
        ]
        for *_, invalid, _ in batches:
            if invalid >= 0:
                rule = "snapshots whose predictions are finite, with variances >= 0"
                got = f"nan, inf or a variance < 0 from {self._name(int(invalid))}"
                _check.fail("params", rule, got, "Leave that snapshot, or its chain, out.")
        averages, chains, _, forms = zip(*batches, strict=True)
        if are_probabilities(np.sum(forms, axis=0)):
            warn(
                "`predict`: the outputs of `apply_fn` look like probabilities. Return logits: leave"
                " out the softmax or sigmoid."
            )
        each = self._concatenate(chains, 1)
        if self.per == "draw":
            axes = -1, cast(int, self.num_chains)
            each = self._concatenate(self._draws)
            each = jax.tree.map(lambda x: x.reshape(*axes, *x.shape[1:]).swapaxes(0, 1), each)
        kinds = (name for name in ("variance", "entropy") if getattr(self.likelihood, name))
        return self._concatenate(averages)._replace(uncertainty=next(kinds, None), each=each)

    @_check.called("Predictor")
    def _require_fit(self, params: object):
        """Require outputs of the model that match likelihood and targets."""
        read, batch = self.likelihood, self._batches[0]
        if read.mean is None and (read.variance is not None or read.entropy is not None):
            rule = "a `Likelihood` with a `mean`, because it has `variance` or `entropy`"
            _check.fail("likelihood", rule, "one without `mean`")
        if read.log_density is None and self.targets is not None:
            rule = "a `Likelihood` with a `log_density` for the targets"
            _check.fail("likelihood", rule, "one without `log_density`")
        whole = self.num_inputs
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((whole, *x.shape[1:]), x.dtype), batch)
        shapes = jax.tree.map(np.shape, batch[0])
        rule = "a function of a snapshot and the inputs"
        advice = f"It was called with inputs of the shapes {_check.cut(shapes)}."
        given = params, batch[0]
        outputs = _check.traced("apply_fn", self.apply_fn, *given, rule=rule, advice=advice)
        if read.check is not None:
            read.check(outputs, self.targets)
        rule = "one whose functions accept the outputs"
        outcome, _ = _check.traced("likelihood", self._outcome, params, batch, rule=rule)
        shapes = jax.tree.map(np.shape, (outcome.mean, outcome.variance))
        if outcome.variance is not None and shapes[0] != shapes[1]:
            rule = f"one whose variance has the shape {shapes[0]} of its mean"
            _check.fail("likelihood", rule, shapes[1])
        for leaf in jax.tree.leaves(outcome):
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                _check.fail("apply_fn", "one with real predictions", leaf.dtype)
            if leaf.shape[:1] != (self.num_inputs,):
                rule = f"one that returns arrays [input, ...] of {self.num_inputs} inputs"
                _check.fail("likelihood", rule, f"shape {leaf.shape}")
        size = sum(map(np.size, jax.tree.leaves(self.targets)))
        shape = np.shape(outcome.log_density)
        if shape[:2] == (self.num_inputs,) * 2 and math.prod(shape) > size:
            rule = f"one with at most one log density for each of the {size} targets"
            advice = "Targets [input] and outputs [input, 1] broadcast to [input, input]."
            _check.fail("likelihood", rule, f"shape {shape}", advice)
        if self.targets is not None and read.has_target is not None:
            self._has_target = np.asarray(read.has_target(self.targets))
            if not self._has_target.any():
                _check.fail("targets", "one target or more", "padding alone")

    @cached_property
    def _zero(self) -> Callable:
        """The compiled function that makes an empty average with the shapes of the outputs."""

        def zero(params, batch):
            average = _average_of(*self._outcome(params, batch), jnp.int32(0))
            none = jax.tree.map(jnp.zeros_like, average)
            least = jax.tree.map(lambda x: x - jnp.inf, none.largest)
            return none._replace(largest=least, invalid=none.invalid - 1)

        return jax.jit(parallel.over_chains(zero, mesh=self.mesh, in_axes=(0, None)))

    def _compile(self, average: Average) -> Callable:
        """Compile the function that adds a row of snapshots to their averages in place."""

        def add(average, params, number, batch):
            outcome, form = self._outcome(params, batch)
            average = average.add(outcome, form, number)
            return average, outcome if self.per == "draw" else None

        own = jax.tree.map(lambda x: x.sharding, average)
        over_rows = parallel.over_chains(add, mesh=self.mesh, in_axes=(0, 0, 0, None))
        return jax.jit(over_rows, donate_argnums=0, out_shardings=(own, self._everywhere))

    @cached_property
    def _finish(self) -> Callable:
        """The compiled function that combines the averages of all rows."""
        entropy = self.likelihood.entropy

        def finish(groups):
            chains = jax.tree.map(lambda *x: jnp.concatenate(x), *groups)
            first, others = (
                jax.tree.map(lambda x, at=at: x[at], chains) for at in (0, slice(1, None))
            )
            total, _ = jax.lax.scan(lambda so_far, one: (so_far.join(one), None), first, others)
            each = jax.vmap(lambda x: x.outcome(entropy))(chains) if self.per == "chain" else None
            return total.prediction(entropy), each, total.invalid, total.form

        return jax.jit(finish)

    def _outcome(self, params: object, batch: tuple[object, object]) -> tuple[Outcome, jax.Array]:
        """Return the prediction of one snapshot, in full precision, and the form of the outputs."""
        (inputs, targets), read = batch, self.likelihood
        outputs = jax.tree.map(_in_full_precision, self.apply_fn(params, inputs))
        mean = None if read.mean is None else read.mean(outputs)
        density = None if targets is None else read.log_density(outputs, targets)
        if density is not None and read.has_target is not None:
            density = jnp.where(read.has_target(targets), density, 0)
        outcome = Outcome(
            mean=mean,
            variance=None if read.variance is None else read.variance(outputs),
            entropy=None if read.entropy is None else read.entropy(mean),
            log_density=density,
        )
        # Integers and booleans are averaged as numbers.
        return jax.tree.map(lambda x: _in_full_precision(1.0 * x), outcome), form_of(read, outputs)

    def _evaluate(self):
        """Run the waiting snapshots, each on its row of devices; ignore results of idle rows."""
        first = self.count - len(self._waiting)
        numbers, rows = np.full(self._rows, -1, np.int32), self._waiting[:1] * self._rows
        for number, params in enumerate(self._waiting, first):
            numbers[number % self._rows], rows[number % self._rows] = number, params
        taken = numbers >= 0
        stacked = jax.tree.map(lambda *x: np.stack([np.asarray(each) for each in x]), *rows)
        with _check.called("Predictor", "parallel.place", tree="params"):
            params = parallel.place(stacked, mesh=self.mesh, specs=self.specs)
        numbers = parallel.place(numbers, mesh=self.mesh)
        if not self._averages:
            # Use the devices on which the compiler places the outputs.
            self._averages = [
                [self._zero(params, batch) for _ in range(self._num_groups)]
                for batch in self._batches
            ]
        group = first // self._rows % self._num_groups
        outcomes = []
        for groups, batch in zip(self._averages, self._batches, strict=True):
            if (size := len(jax.tree.leaves(batch)[0])) not in self._adds:
                self._adds[size] = self._compile(groups[group])
            result = self._adds[size](groups[group], params, numbers, batch)
            groups[group], outcome = self._settled(result)
            outcomes.append(jax.tree.map(lambda x: np.asarray(x)[taken], outcome))
        if self.per == "draw":
            self._draws.append(self._concatenate(outcomes, axis=1))
        self._waiting = []

    def _settled(self, result: T) -> T:
        """Wait for the result of a program on virtual CPU devices.

        These share a few threads, so two programs with communication could deadlock.
        """
        on_cpu = self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu"
        return jax.block_until_ready(result) if on_cpu else result

    def _concatenate(self, parts: Sequence[object], axis: int = 0) -> Any:
        """Concatenate predictions along an axis, on the host; the density of padding is NaN."""
        whole = jax.tree.map(lambda *x: np.concatenate([*map(np.asarray, x)], axis), *parts)
        if self._has_target is None or whole is None:
            return whole
        return whole._replace(log_density=np.where(self._has_target, whole.log_density, np.nan))

    def _name(self, number: int) -> str:
        if self.num_chains is None:
            return f"snapshot {number}"
        return f"chain {number % self.num_chains}, draw {number // self.num_chains}"


def _in_full_precision(x: ArrayLike) -> jax.Array:
    """Cast half-precision numbers to float32."""
    x, is_exact = jnp.asarray(x), not jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return x if is_exact else x.astype(jnp.promote_types(x.dtype, jnp.float32))


class Average(NamedTuple):
    """Average over `count` snapshots, in constant memory and with compensated summation.

    Attributes:
        mean, variance, entropy: averages of these fields of an `Outcome`.
        rest: rounding error of `mean`, carried by compensated summation.
        spread: sum of squared deviations of the means from their average; None without `variance`.
        largest: largest log density of each target.
        relative: sum of exp(log density - largest).
        invalid: index of the first snapshot whose prediction is invalid, or -1; int32.
        form: sum of `likelihoods.form_of`.
    """

    count: jax.Array
    mean: Any
    variance: Any
    entropy: Any
    rest: Any
    spread: Any
    largest: Any
    relative: Any
    invalid: jax.Array
    form: jax.Array

    def add(self, outcome: Outcome, form: jax.Array, number: jax.Array) -> Average:
        """Add one snapshot; a negative `number` leaves the average unchanged."""
        return optax.tree.where(number >= 0, self.join(_average_of(outcome, form, number)), self)

    def join(self, other: Average) -> Average:
        """Combine two averages into the average over the snapshots of both.

        Means and squared deviations follow Chan, Golub and LeVeque 1979; densities are stored
        relative to the largest.
        """
        count = self.count + other.count

        def share(x):
            return other.count.astype(x.dtype) / jnp.maximum(count, 1).astype(x.dtype)

        def mean(x, y):
            return x + (y - x) * share(x)

        def moved(x, y, rest_of_x, rest_of_y):
            return rest_of_x + ((y - x) + (rest_of_y - rest_of_x)) * share(x)

        def spread(x, y, at, to):
            return x + y + (to - at) ** 2 * share(x) * self.count.astype(x.dtype)

        def relative(x, y, of_x, of_y):
            largest = jnp.maximum(of_x, of_y)
            base = jnp.where(jnp.isfinite(largest), largest, 0)
            return x * jnp.exp(of_x - base) + y * jnp.exp(of_y - base)

        largest = self.largest, other.largest
        means = (self.mean, other.mean) if self.spread is not None else (None, None)
        # Kahan 1965: the rounding error of a sum is added to the next one.
        moves = jax.tree.map(moved, self.mean, other.mean, self.rest, other.rest)
        center = jax.tree.map(jnp.add, self.mean, moves)
        both = self.invalid, other.invalid
        earliest = jnp.where(jnp.minimum(*both) < 0, jnp.maximum(*both), jnp.minimum(*both))
        return Average(
            count=count,
            mean=center,
            variance=jax.tree.map(mean, self.variance, other.variance),
            entropy=jax.tree.map(mean, self.entropy, other.entropy),
            rest=jax.tree.map(lambda x, move, to: move - (to - x), self.mean, moves, center),
            spread=jax.tree.map(spread, self.spread, other.spread, *means),
            largest=jax.tree.map(jnp.maximum, *largest),
            relative=jax.tree.map(relative, self.relative, other.relative, *largest),
            invalid=earliest,
            form=self.form + other.form,
        )

    def outcome(self, entropy_of: EntropyOf) -> Outcome:
        """Return the averaged prediction; `entropy_of` returns the entropy of its mean."""
        density = variance = None
        if self.relative is not None:
            density = self.largest + jnp.log(self.relative / self.count)
        if self.variance is not None:
            variance = self.variance + self.spread / self.count
        entropy = None if entropy_of is None else entropy_of(self.mean)
        return Outcome(self.mean, variance, entropy, density)

    def prediction(self, entropy_of: EntropyOf) -> Prediction:
        """Return the averaged prediction with its uncertainty split in two."""
        outcome, parts = self.outcome(entropy_of), (None, None, None)
        if self.variance is not None:
            parts = outcome.variance, self.variance, self.spread / self.count
        elif self.entropy is not None:
            epistemic = jnp.maximum(outcome.entropy - self.entropy, 0)
            parts = outcome.entropy, self.entropy, epistemic
        total, aleatoric, epistemic = parts
        return Prediction(outcome.mean, outcome.log_density, total, aleatoric, epistemic)


def _average_of(outcome: Outcome, form: jax.Array, number: jax.Array) -> Average:
    """Return the average over one snapshot, of this number."""
    zero = jax.tree.map(jnp.zeros_like, outcome)
    return Average(
        count=jnp.ones((), jnp.int32),
        mean=outcome.mean,
        variance=outcome.variance,
        entropy=outcome.entropy,
        rest=zero.mean,
        spread=None if outcome.variance is None else zero.mean,
        largest=outcome.log_density,
        relative=jax.tree.map(jnp.ones_like, outcome.log_density),
        invalid=jnp.where(_is_valid(outcome), -1, number),
        form=form,
    )


def _is_valid(outcome: Outcome) -> jax.Array:
    """Return whether a prediction is finite with variances >= 0; a density may be zero."""
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(outcome._replace(log_density=None))]
    if outcome.variance is not None:
        finite.append(jnp.all(outcome.variance >= 0))
    if outcome.log_density is not None:
        finite.append(jnp.all(outcome.log_density < jnp.inf))
    return jnp.all(jnp.array(finite))
