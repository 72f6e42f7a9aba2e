"""The Bayesian model average, updated draw by draw."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optax_smile import _check, parallel
from optax_smile.draws import _average, _checks
from optax_smile.draws._average import Average
from optax_smile.draws.likelihoods import Likelihood, Name
from optax_smile.draws.prediction import Outcome, Prediction, Uncertainty

Per = Literal["chain", "draw"]


# Constraints of the arguments of both `predict` and `Predictor`.
READ: dict[str, _check.Constraint] = {
    "apply_fn": _check.Function("(params, inputs)"),
    "inputs": _checks.Inputs(),
    "likelihood": _checks.Reading(),
    "targets": _checks.Targets(),
    "batch_size": _check.Whole(1) | None,
    "per": _check.OneOf(Per) | None,
}


class Predictor:
    """Incremental version of `predict`: `update` with each snapshot, `finalize` at any time.

    For loops that do not keep snapshots. Arguments and errors as for `predict`; `num_chains` is the
    number of chains that the snapshots, ordered draw by draw, come from. It is required for `per`,
    and lets errors name a draw.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> predictor = optax_smile.Predictor(
        ...     lambda params, x: x @ params, jnp.eye(2), likelihood="categorical"
        ... )
        >>> predictor.update(jnp.eye(2))
        >>> predictor.update(-jnp.eye(2))
        >>> predictor.finalize().mean.tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """

    @_check.arguments("Predictor", **READ, num_chains=_check.Whole(1) | None)
    def __init__(
        self,
        apply_fn: Callable[[optax.Params, Any], Any],
        inputs: Any,
        *,
        likelihood: Name | Likelihood,
        targets: Any = None,
        batch_size: int | None = None,
        num_chains: int | None = None,
        per: Per | None = None,
        mesh: Mesh | None = None,
        specs: Any = None,
    ):
        if per is not None and num_chains is None:
            rule = "None for snapshots without `num_chains`"
            remedy = "Pass `Snapshots` to `predict`, or `num_chains` to `Predictor`."
            _check.fail("Predictor", "per", rule, repr(per), remedy)
        self.num_inputs = _checks.num_inputs(inputs)
        parallel.check_mesh("Predictor", mesh, num_chains if per == "chain" and num_chains else 0)
        self.apply_fn, self.targets = apply_fn, targets
        self.likelihood = cast(Likelihood, likelihood)
        self.mesh, self.specs, self.per, self.num_chains = mesh, specs, per, num_chains
        self._rows = 1 if mesh is None else mesh.shape[parallel.CHAIN]
        self._num_groups = cast(int, num_chains) // self._rows if per == "chain" else 1
        # Snapshot n runs on row n % rows of the devices and is averaged there in group
        # (n // rows) % num_groups. With `per="chain"` each chain has its own row and group.
        self._batches = [
            jax.tree.map(jnp.asarray, parallel.place_batch(batch, mesh=mesh))
            for batch in _split((inputs, targets), batch_size or self.num_inputs)
        ]
        self._everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self.count: int = 0
        self._waiting, self._first, self._averages, self._draws = [], None, [], []
        self._adds: list[Callable] = []

    @_check.arguments("Predictor.update", params=_check.Tree())
    def update(self, params: optax.Params) -> None:
        """Add one snapshot, a parameter tree.

        Raises:
            ValueError: a tree unlike the first one, or outputs that do not match the likelihood or
                the targets.
        """
        if self._first is None:
            self._first = jax.eval_shape(lambda x: x, params)
            self._require_fit(self._first)
        self._require_alike(params)
        # Copy snapshots that have to wait: the caller may modify or donate their arrays.
        self._waiting.append(params if self._rows == 1 else jax.tree.map(np.array, params))
        self.count += 1
        if self.count % self._rows == 0:
            self._evaluate()

    def restart(self) -> None:
        """Discard all snapshots, but keep the compiled programs."""
        self.count = 0
        self._waiting, self._averages, self._draws = [], [], []

    def finalize(self) -> Prediction:
        """Return the average over the snapshots so far, a `Prediction`; more may follow.

        Raises:
            ValueError: no snapshots; with `per`, different numbers of draws per chain; predictions
                that are not finite (the message names chain and draw).
        """
        if self.per is not None and self.count % cast(int, self.num_chains):
            rule = f"the same number of draws of each of the {self.num_chains} chains"
            _check.fail("Predictor.update", "params", rule, f"{self.count} snapshots")
        average, chains = self._join()
        return average._replace(each=self._by_draw() if self.per == "draw" else chains)

    def _join(self) -> tuple[Prediction, Outcome | None]:
        """Return the average over all snapshots, and over those of each chain."""
        if not self.count:
            _check.fail("Predictor.update", "params", "at least one parameter tree", "none")
        if self._waiting:
            self._evaluate()
        batches = [
            self._settled(self._finish(jax.device_put(groups, self._everywhere)))
            for groups in self._averages
        ]
        for *_, invalid in batches:
            if invalid >= 0:
                rule = "snapshots whose predictions are finite"
                got = f"nan or inf from {self._name(int(invalid))}"
                remedy = "Check that the inputs are finite; if they are, leave that chain out."
                _check.fail("Predictor.update", "params", rule, got, remedy)
        averages, chains, _ = zip(*batches, strict=True)
        average = _concatenate(averages)._replace(uncertainty=self._uncertainty())
        return average, _concatenate(chains, axis=1)

    def _uncertainty(self) -> Uncertainty | None:
        if self.likelihood.variance is not None:
            return "variance"
        return None if self.likelihood.entropy is None else "entropy"

    def _require_fit(self, params: Any):
        """Require outputs of the model that match likelihood and targets."""
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.num_inputs, *x.shape[1:]), x.dtype),
            self._batches[0],
        )
        rule, given = "a function of a snapshot and the inputs", (params, batch[0])
        outputs = _check.traced("Predictor", "apply_fn", self.apply_fn, *given, rule=rule)
        if self.likelihood.check is not None:
            self.likelihood.check(outputs, self.targets)
        read, needs = self.likelihood, None
        if read.mean is None and (read.variance is not None or read.entropy is not None):
            needs = "a `mean`, which `variance` and `entropy` require"
        if read.log_density is None and self.targets is not None:
            needs = "a `log_density` for the targets"
        if needs is not None:
            _check.fail("Predictor", "likelihood", f"one with {needs}", "none")
        rule = "one whose functions accept the outputs"
        outcome = _check.traced("Predictor", "likelihood", self._outcome, params, batch, rule=rule)
        shapes = jax.tree.map(np.shape, (outcome.mean, outcome.variance))
        if outcome.variance is not None and shapes[0] != shapes[1]:
            rule = f"one whose variance has the shape {shapes[0]} of its mean"
            _check.fail("Predictor", "likelihood", rule, shapes[1])
        for leaf in jax.tree.leaves(outcome):
            if leaf.shape[:1] != (self.num_inputs,):
                rule = f"one that returns arrays [input, ...] of {self.num_inputs} inputs"
                _check.fail("Predictor", "likelihood", rule, f"shape {leaf.shape}")

    @functools.cached_property
    def _zero(self) -> Callable:
        """The compiled function that makes an empty average with the shapes of the outputs."""

        def zero(params, batch):
            return _average.zero(self._outcome(params, batch))

        return jax.jit(parallel.over_chains(zero, mesh=self.mesh, in_axes=(0, None)))

    def _begin(self, params: Any):
        """Make empty averages on the devices where the compiler places the outputs."""
        self._averages = [
            [self._zero(params, batch) for _ in range(self._num_groups)] for batch in self._batches
        ]
        if self._adds:
            return
        # All batches except the last have the same shape.
        first, last = self._averages[0][0], self._averages[-1][0]
        add = self._compile(first)
        is_alike = jax.tree.map(np.shape, first) == jax.tree.map(np.shape, last)
        self._adds = [add] * len(self._batches)
        self._adds[-1] = add if is_alike else self._compile(last)

    def _compile(self, average: Average) -> Callable:
        """Compile the function that adds a row of snapshots to their averages in place."""
        own = jax.tree.map(lambda x: x.sharding, average)

        def add(average, params, number, batch):
            outcome = self._outcome(params, batch)
            average = _average.add(average, outcome, number)
            return average, outcome if self.per == "draw" else None

        over_rows = parallel.over_chains(add, mesh=self.mesh, in_axes=(0, 0, 0, None))
        return jax.jit(over_rows, donate_argnums=0, out_shardings=(own, self._everywhere))

    @functools.cached_property
    def _finish(self) -> Callable:
        """The compiled function that combines the averages of all rows."""

        entropy = self.likelihood.entropy

        def finish(groups):
            chains = jax.tree.map(lambda *x: jnp.concatenate(x), *groups)
            first, others = (
                jax.tree.map(lambda x, at=at: x[at], chains) for at in (0, slice(1, None))
            )
            total, _ = jax.lax.scan(
                lambda so_far, one: (_average.join(so_far, one), None), first, others
            )
            each = (
                jax.vmap(lambda x: _average.outcome_of(x, entropy))(chains)
                if self.per == "chain"
                else None
            )
            return _average.prediction_of(total, entropy), each, total.invalid

        return jax.jit(finish)

    def _outcome(self, params: Any, batch: tuple[Any, Any]) -> Outcome:
        """Return the prediction of one snapshot, in full precision."""
        (inputs, targets), read = batch, self.likelihood
        outputs = jax.tree.map(_in_full_precision, self.apply_fn(params, inputs))
        mean = None if read.mean is None else read.mean(outputs)
        outcome = Outcome(
            mean=mean,
            variance=None if read.variance is None else read.variance(outputs),
            entropy=None if read.entropy is None else read.entropy(mean),
            log_density=None if targets is None else read.log_density(outputs, targets),
        )
        return jax.tree.map(_in_full_precision, outcome)

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
            self._begin(params)
        group = first // self._rows % self._num_groups
        outcomes = []
        for add, groups, batch in zip(self._adds, self._averages, self._batches, strict=True):
            groups[group], outcome = self._settled(add(groups[group], params, numbers, batch))
            outcomes.append(jax.tree.map(lambda x: np.asarray(x)[taken], outcome))
        if self.per == "draw":
            self._draws.append(_concatenate(outcomes, axis=1))
        self._waiting = []

    def _settled(self, result: Any) -> Any:
        """Wait for the result of a program on virtual CPU devices.

        These share a few threads, so two programs with communication could deadlock.
        """
        on_cpu = self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu"
        return jax.block_until_ready(result) if on_cpu else result

    def _by_draw(self) -> Outcome:
        def of_draws(flat):
            by_draw = flat.reshape(-1, cast(int, self.num_chains), *flat.shape[1:])
            return np.swapaxes(by_draw, 0, 1)

        return jax.tree.map(of_draws, _concatenate(self._draws))

    def _name(self, number: int) -> str:
        if self.num_chains is None:
            return f"snapshot {number}"
        return f"chain {number % self.num_chains}, draw {number // self.num_chains}"

    def _require_alike(self, params: Any):
        shapes = jax.tree.map(lambda x: np.shape(x), params)
        expected = jax.tree.map(lambda x: x.shape, self._first)
        if shapes != expected:
            rule = f"snapshots of one model, like the first with shapes {expected}"
            _check.fail(
                "Predictor.update", "params", rule, f"{shapes} from {self._name(self.count)}"
            )


def _in_full_precision(x: Any) -> jax.Array:
    """Cast half-precision numbers to float32."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if _is_inexact(x) else x


def _is_inexact(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _split(tree: Any, size: int) -> list:
    """Split arrays `[input, ...]` into batches."""
    num_inputs = len(jax.tree.leaves(tree)[0])
    return [
        jax.tree.map(lambda x, at=at: x[at : at + size], tree) for at in range(0, num_inputs, size)
    ]


def _concatenate(batches: Sequence[Any], axis: int = 0) -> Any:
    """Concatenate trees along an axis on the host."""
    return jax.tree.map(lambda *x: np.concatenate([np.asarray(each) for each in x], axis), *batches)
