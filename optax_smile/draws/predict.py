"""The Bayesian model average, one snapshot at a time."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optax_smile import _check, parallel
from optax_smile.draws import _average, likelihoods
from optax_smile.draws._average import Average, Outcome
from optax_smile.draws.likelihoods import Likelihood

PER = ("chain", "draw")


class Prediction(NamedTuple):
    """Average over all snapshots, NumPy arrays.

    Attributes:
        mean: predictive mean or class probabilities, `[input, ...]`; None for `"tokens"`.
        log_density: log of the average likelihood of each target, nats, `[input]` (`[input, token]`
            for `"tokens"`, 0 where there is none); its mean is the log pointwise predictive density
            (LPPD). None without targets.
        total: uncertainty of the prediction `[input, ...]`: entropy in nats of class probabilities,
            else variance. None where the likelihood tells neither.
        aleatoric: average uncertainty of a single snapshot, the noise in the data.
        epistemic: their difference, at least 0, what more data would resolve: the mutual
            information of target and parameters, or the variance of the means of the snapshots.
        uncertainty: what they are: `"entropy"`, `"variance"`, or None.
        each: with `per`, an `Outcome` of single draws, arrays `[chain, draw, input, ...]`, or of
            the averages of single chains, `[chain, input, ...]`: fields `mean`, `variance`,
            `entropy` and `log_density`, the uncertainties those of a draw or in total of a chain.
        curve: with `members`, a `Prediction` for each of these numbers of snapshots, without
            `each`.
    """

    mean: Any
    log_density: Any
    total: Any = None
    aleatoric: Any = None
    epistemic: Any = None
    uncertainty: str | None = None
    each: Any = None
    curve: Any = ()


class Predictor:
    """The average of `predict` in pieces: `update` with each snapshot, `finalize` at any time.

    For loops that keep no snapshots. Arguments as of `predict`; `num_chains` is how many chains the
    snapshots come from, draw by draw: for `per`, and to name a draw in an error.

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

    def __init__(
        self,
        apply_fn: Callable[[optax.Params, Any], Any],
        inputs: Any,
        *,
        likelihood: str | Likelihood,
        targets: Any = None,
        batch_size: int | None = None,
        num_chains: int | None = None,
        per: str | None = None,
        mesh: Mesh | None = None,
        specs: Any = None,
    ):
        if not isinstance(likelihood, Likelihood):
            _check.choice("predict", "likelihood", likelihood, likelihoods.NAMED)
            likelihood = likelihoods.NAMED[likelihood]
        lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(inputs)}
        if len(lengths) != 1 or lengths & {(), (0,)}:
            rule = "arrays [input, ...] of one length, at least 1"
            _check.fail("predict", "inputs", rule, jax.tree.map(np.shape, inputs))
        self.num_inputs = int(next(iter(lengths))[0])
        if batch_size is not None:
            _check.whole("predict", "batch_size", batch_size, 1)
        if per is not None:
            _check.choice("predict", "per", per, PER)
            if num_chains is None:
                rule = "None for snapshots that do not tell their `num_chains`"
                remedy = "Give them as `Snapshots`, or `num_chains` to `Predictor`."
                _check.fail("predict", "per", rule, repr(per), remedy)
        if num_chains is not None:
            _check.whole("Predictor", "num_chains", num_chains, 1)
        if targets is not None and likelihood in likelihoods.NAMED.values():
            targets = np.asarray(targets)
            if targets.dtype.kind in "OSUV":
                _check.fail("predict", "targets", "numbers", f"{targets.dtype}")
        lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(targets)}
        if lengths - {(self.num_inputs,)}:
            rule = f"arrays [input, ...] of {self.num_inputs} inputs"
            _check.fail("predict", "targets", rule, jax.tree.map(np.shape, targets))
        parallel.check_mesh("predict", mesh, num_chains if per == "chain" and num_chains else 0)
        self.apply_fn, self.likelihood, self.targets = apply_fn, likelihood, targets
        self.mesh, self.specs, self.per, self.num_chains = mesh, specs, per, num_chains
        self._rows = 1 if mesh is None else mesh.shape[parallel.CHAIN]
        self._num_groups = cast(int, num_chains) // self._rows if per == "chain" else 1
        # Snapshot number n runs on row n % rows of the devices, and is averaged there in the group
        # (n // rows) % num_groups: with `per="chain"` each chain has a row and group of its own.
        self._batches = [
            jax.tree.map(jnp.asarray, parallel.place_batch(batch, mesh=mesh))
            for batch in _split((inputs, targets), batch_size or self.num_inputs)
        ]
        self._everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self.count, self._waiting, self._first, self._averages, self._draws = 0, [], None, [], []

    def update(self, params: optax.Params):
        """Take one snapshot in: a parameter tree."""
        if self._first is None:
            self._first = jax.eval_shape(lambda x: x, params)
            self._require_fit(self._first)
        self._require_alike(params)
        # The caller may change or give away arrays that have to wait.
        self._waiting.append(params if self._rows == 1 else jax.tree.map(np.array, params))
        self.count += 1
        if self.count % self._rows == 0:
            self._evaluate()

    def finalize(self) -> Prediction:
        """Give the average over the snapshots so far; more may follow."""
        if self.per is not None and self.count % cast(int, self.num_chains):
            rule = f"as many draws of each of the {self.num_chains} chains"
            _check.fail("predict", "snapshots", rule, f"{self.count}")
        average, chains = self._join()
        return average._replace(each=self._by_draw() if self.per == "draw" else chains)

    def _join(self) -> tuple[Prediction, Outcome | None]:
        """Average over all snapshots, and over those of each chain."""
        if self._first is None:
            _check.fail("predict", "snapshots", "at least one parameter tree", "none")
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
                remedy = "Are the inputs finite? Else leave that chain out."
                _check.fail("predict", "snapshots", rule, got, remedy)
        averages, chains, _ = zip(*batches, strict=True)
        average = _concatenate(averages)._replace(uncertainty=self._uncertainty())
        return average, _concatenate(chains, axis=1)

    def _uncertainty(self) -> str | None:
        if self.likelihood.variance is not None:
            return "variance"
        return None if self.likelihood.entropy is None else "entropy"

    def _require_fit(self, params: Any):
        """Require a model whose outputs the likelihood reads and the targets fit."""
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.num_inputs, *x.shape[1:]), x.dtype),
            self._batches[0],
        )
        if self.likelihood.check is not None:
            outputs = jax.eval_shape(self.apply_fn, params, batch[0])
            self.likelihood.check(outputs, self.targets)
        of, needs = self.likelihood, None
        if of.mean is None and (of.variance is not None or of.entropy is not None):
            needs = "a `mean` to go with `variance` and `entropy`"
        if of.log_density is None and self.targets is not None:
            needs = "a `log_density` for the targets"
        if needs is not None:
            _check.fail("predict", "likelihood", f"one with {needs}", "none")
        outcome = jax.eval_shape(self._outcome, params, batch)
        shapes = jax.tree.map(np.shape, (outcome.mean, outcome.variance))
        if outcome.variance is not None and shapes[0] != shapes[1]:
            rule = f"one whose variance has the shape of its mean, {shapes[0]}"
            _check.fail("predict", "likelihood", rule, shapes[1])
        for leaf in jax.tree.leaves(outcome):
            if leaf.shape[:1] != (self.num_inputs,):
                rule = f"one that gives arrays [input, ...] of {self.num_inputs} inputs"
                _check.fail("predict", "likelihood", rule, f"shape {leaf.shape}")

    def _begin(self, params: Any):
        """Make the averages over no snapshot, where the compiler puts the outputs."""

        def begin(params, batch):
            return _average.zero(self._outcome(params, batch))

        # The outputs are not computed: the compiler sees that only their shapes count.
        over_rows = jax.jit(parallel.over_chains(begin, mesh=self.mesh, in_axes=(0, None)))
        self._averages = [
            [over_rows(params, batch) for _ in range(self._num_groups)] for batch in self._batches
        ]
        # All batches but the last are of one shape.
        first, last = self._averages[0][0], self._averages[-1][0]
        add = self._compile(first)
        is_alike = jax.tree.map(np.shape, first) == jax.tree.map(np.shape, last)
        self._adds = [add] * len(self._batches)
        self._adds[-1] = add if is_alike else self._compile(last)

    def _compile(self, average: Average) -> Callable:
        """Compile what takes a row of snapshots into their averages, which stay where they lie."""
        own = jax.tree.map(lambda x: x.sharding, average)

        def add(average, params, number, batch):
            outcome = self._outcome(params, batch)
            average = _average.add(average, outcome, number)
            return average, outcome if self.per == "draw" else None

        over_rows = parallel.over_chains(add, mesh=self.mesh, in_axes=(0, 0, 0, None))
        return jax.jit(over_rows, donate_argnums=0, out_shardings=(own, self._everywhere))

    @functools.cached_property
    def _finish(self) -> Callable:
        """Compile what joins the averages of all rows."""

        def finish(groups):
            chains = jax.tree.map(lambda *x: jnp.concatenate(x), *groups)
            first, others = (
                jax.tree.map(lambda x, at=at: x[at], chains) for at in (0, slice(1, None))
            )
            total, _ = jax.lax.scan(
                lambda so_far, one: (_average.join(so_far, one), None), first, others
            )
            each = jax.vmap(self._outcome_of)(chains) if self.per == "chain" else None
            return self._prediction(total), each, total.invalid

        return jax.jit(finish)

    def _outcome(self, params: Any, batch: tuple[Any, Any]) -> Outcome:
        """What one snapshot predicts, in full precision."""
        (inputs, targets), of = batch, self.likelihood
        outputs = jax.tree.map(_in_full_precision, self.apply_fn(params, inputs))
        mean = None if of.mean is None else of.mean(outputs)
        outcome = Outcome(
            mean=mean,
            variance=None if of.variance is None else of.variance(outputs),
            entropy=None if of.entropy is None else of.entropy(mean),
            log_density=None if targets is None else of.log_density(outputs, targets),
        )
        return jax.tree.map(_in_full_precision, outcome)

    def _outcome_of(self, average: Average) -> Outcome:
        """What an average predicts."""
        entropy, density = self.likelihood.entropy, None
        if average.relative is not None:
            density = average.largest + jnp.log(average.relative / average.count)
        variance = average.variance
        if variance is not None:
            variance += average.spread / average.count
        return Outcome(
            mean=average.mean,
            variance=variance,
            entropy=None if entropy is None else entropy(average.mean),
            log_density=density,
        )

    def _prediction(self, average: Average) -> Prediction:
        outcome = self._outcome_of(average)
        prediction = Prediction(outcome.mean, outcome.log_density)
        if average.variance is not None:
            return prediction._replace(
                total=outcome.variance,
                aleatoric=average.variance,
                epistemic=average.spread / average.count,
            )
        if average.entropy is not None:
            return prediction._replace(
                total=outcome.entropy,
                aleatoric=average.entropy,
                epistemic=jnp.maximum(outcome.entropy - average.entropy, 0),
            )
        return prediction

    def _evaluate(self):
        """Run the snapshots that wait, each on its row of devices; the other rows run for none."""
        first = self.count - len(self._waiting)
        numbers, rows = np.full(self._rows, -1, np.int32), self._waiting[:1] * self._rows
        for number, params in enumerate(self._waiting, first):
            numbers[number % self._rows], rows[number % self._rows] = number, params
        taken = numbers >= 0
        stacked = jax.tree.map(lambda *x: np.stack([np.asarray(each) for each in x]), *rows)
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
        """Wait for a program on virtual CPU devices.

        They share a few threads: two programs that exchange data could wait for each other forever.
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
            rule = f"snapshots of one model, as the first with {expected}"
            _check.fail("predict", "snapshots", rule, f"{shapes} from {self._name(self.count)}")


def _in_full_precision(x: Any) -> jax.Array:
    """Take half-precision numbers as float32."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if _is_inexact(x) else x


def _is_inexact(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _split(tree: Any, size: int) -> list:
    """Cut arrays `[input, ...]` into batches."""
    num_inputs = len(jax.tree.leaves(tree)[0])
    return [
        jax.tree.map(lambda x, at=at: x[at : at + size], tree) for at in range(0, num_inputs, size)
    ]


def _concatenate(batches: Sequence[Any], axis: int = 0) -> Any:
    """Join trees along an axis on the host."""
    return jax.tree.map(lambda *x: np.concatenate([np.asarray(each) for each in x], axis), *batches)


def predict(
    apply_fn: Callable[[optax.Params, Any], Any],
    snapshots: Iterable[optax.Params],
    inputs: Any,
    *,
    likelihood: str | Likelihood,
    targets: Any = None,
    batch_size: int | None = None,
    members: Sequence[int] = (),
    per: str | None = None,
    mesh: Mesh | None = None,
    specs: Any = None,
) -> Prediction:
    """Average the predictions of all snapshots, holding the outputs of one per device.

    With densities p_s(y | x) of S snapshots the average is p = sum_s p_s / S, its log density
    log p, and its uncertainty H[p] = sum_s H[p_s] / S + mutual information for class probabilities,
    Var = sum_s Var_s / S + variance of the means for others.

    Args:
        apply_fn: `apply_fn(params, inputs)`, the outputs of one model for the inputs.
        snapshots: parameter trees: what `sample` returns, `Snapshots.from_members(members)` for a
            deep ensemble, or any other iterable, also a generator, which is gone through once.
        inputs: what `apply_fn` takes, arrays `[input, ...]`; they stay on the device.
        likelihood: how the outputs are read, and what the targets are:

            - `"categorical"`: logits `[input, class]`, labels `[input]`.
            - `"bernoulli"`: logits `[input, ...]`, targets 0 or 1 of the same shape.
            - `"gaussian"`: a pair of mean `[input, ...]` and log standard deviation, predicted or
              sampled as one of the parameters: a scalar, or of as many axes as the mean, each as
              long or 1; targets like the mean.
            - `"tokens"`: logits `[input, token, class]`, labels `[input, token]`, -1 for padding.
            - a `Likelihood` of one's own.
        targets: what was observed, `[input, ...]`.
        batch_size: inputs to run at once, >= 1; None: all.
        members: numbers of snapshots, ascending, after which the average so far is told, too. They
            come draw by draw: of 4 chains, 8 are two draws of each.
        per: `"draw"`: also what each draw predicts, `"chain"`: also the average of each chain; in
            host memory.
        mesh: devices, see `parallel.place`: the axis `"chain"` takes as many snapshots at a time,
            the axis `"data"` spreads the inputs.
        specs: how the parameters of one snapshot are sharded, see `parallel.place`.

    Returns:
        A `Prediction`.

    Raises:
        ValueError: an argument out of range; no snapshots, or of different models; predictions that
            are not finite, naming chain and draw; a likelihood that does not fit the outputs;
            targets that do not fit it.

    Cost: one forward pass per snapshot, whose parameters go through the host. Memory for the
    outputs of one snapshot per device and three times their average (with `per="chain"` for each
    chain).

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> apply_fn = lambda params, x: x @ params
        >>> prediction = optax_smile.predict(
        ...     apply_fn, [jnp.eye(2), -jnp.eye(2)], jnp.eye(2), likelihood="categorical"
        ... )
        >>> prediction.mean.tolist()
        [[0.5, 0.5], [0.5, 0.5]]

    Source: entropy and mutual information: Depeweg et al. 2018.
    """
    if not np.iterable(members):
        _check.fail("predict", "members", "a sequence of integers", repr(members))
    for member in members:
        _check.whole("predict", "members", member, 1)
    members = tuple(int(member) for member in members)
    wrong = isinstance(snapshots, (Mapping, str, os.PathLike))
    if wrong or not hasattr(snapshots, "__iter__"):
        rule = "an iterable of parameter trees"
        remedy = "See `Snapshots`, `Snapshots.from_members` and `load_snapshots`."
        _check.fail("predict", "snapshots", rule, type(snapshots).__name__, remedy)
    if list(members) != sorted(set(members)):
        _check.fail("predict", "members", "ascending", members)
    predictor = Predictor(
        apply_fn,
        inputs,
        likelihood=likelihood,
        targets=targets,
        batch_size=batch_size,
        num_chains=getattr(snapshots, "num_chains", None),
        per=per,
        mesh=mesh,
        specs=specs,
    )
    curve = []
    for params in snapshots:
        predictor.update(params)
        if predictor.count in members:
            curve.append(predictor._join()[0])
    if len(curve) < len(members) and predictor.count:
        rule = f"at most the {predictor.count} snapshots"
        _check.fail("predict", "members", rule, members)
    return predictor.finalize()._replace(curve=tuple(curve))
