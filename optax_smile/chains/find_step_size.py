"""Which step size? Short chains with each of several, judged by what they predict."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np
import optax

from optax_smile import _check, parallel
from optax_smile._table import aligned
from optax_smile.chains import _loop
from optax_smile.chains.sample import sample
from optax_smile.draws.likelihoods import Likelihood
from optax_smile.draws.predict import predict
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots
from optax_smile.state import MOST_NONFINITE

# Lengths of steps of `psmile` and `smile`: from chains that hardly move to networks that do not
# survive.
STEP_SIZES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
# What is counted of the chains.
COUNTED = "num_gradients", "num_rejected", "num_nonfinite"
# A difference of more standard errors is hardly chance.
CLEAR_ERRORS = 2.0


class StepSizeSearch(NamedTuple):
    """What `find_step_size` finds; `str(search)` is a table in plain words.

    Attributes:
        step_sizes: that were tried, ascending, `[candidate]`.
        lppd: log pointwise predictive density of the validation data, nats per input, of all
            chains together, `[candidate]`; -inf where chains left the finite numbers.
        standard_error: of the difference of `lppd` to the best, over the inputs, `[candidate]`; NaN
            where `lppd` is -inf, and of a single input.
        chain_lppd: of each chain alone, `[candidate, chain]`.
        rejected: rejected steps per gradient, all chains together, `[candidate]`.
        start_lppd: `lppd` of the start of the chains.
        start_chain_lppd: `chain_lppd` of the start, `[chain]`.
        name: of the number that was tried.
    """

    step_sizes: np.ndarray
    lppd: np.ndarray
    standard_error: np.ndarray
    chain_lppd: np.ndarray
    rejected: np.ndarray
    start_lppd: float
    start_chain_lppd: np.ndarray
    name: str = "step size"

    @property
    def best(self) -> float:
        """The step size with the largest LPPD."""
        return float(self.step_sizes[np.argmax(self.lppd)])

    def __str__(self) -> str:
        def column(values: np.ndarray, form: str) -> list[str]:
            return ["-" if np.isnan(value) else format(value, form) for value in values]

        alone = np.array([self.start_chain_lppd, *self.chain_lppd]).mean(axis=1)
        table = {
            self.name: ["start", *column(self.step_sizes, ".3g")],
            "LPPD": column(np.array([self.start_lppd, *self.lppd]), ".5g"),
            "of one chain": column(alone, ".5g"),
            "below best": ["-", *column(self.lppd.max() - self.lppd, ".2g")],
            "error": ["-", *column(self.standard_error, ".2g")],
            "rejected": ["-", *column(self.rejected, ".2g")],
        }
        return "\n".join([*aligned(table), "", *self._notes()])

    def _notes(self) -> Iterator[str]:
        yield f"Best: {self.best:.3g}"
        near = self.lppd.max() - self.lppd <= CLEAR_ERRORS * self.standard_error
        others = [f"{size:.3g}" for size in self.step_sizes[near] if size != self.best]
        if others:
            yield f"Not clearly worse ({CLEAR_ERRORS:g} standard errors): {', '.join(others)}"
        if self.best == self.step_sizes[0]:
            yield f"The best is the smallest {self.name} that was tried: try smaller ones."
        if self.best == self.step_sizes[-1]:
            yield f"The best is the largest {self.name} that was tried: try larger ones."
        if self.start_lppd >= self.lppd.max():
            yield f"No {self.name} predicts better than the start: give the chains more steps."
        if np.isneginf(self.lppd).any():
            yield "-inf: chains or predictions left the finite numbers."


@dataclass(frozen=True)
class _Ascending(_check.Constraint):
    """At least two numbers above zero, which become a tuple of floats."""

    text = "at least 2 ascending numbers > 0"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        if not np.iterable(value) or isinstance(value, jax.core.Tracer):
            _check.fail(where, argument, self.text, _check.show(value))
        positive = _check.Real(0, open="low", traced=False)
        numbers = tuple(float(positive(where, argument, number)) for number in value)
        if len(numbers) < 2 or list(numbers) != sorted(set(numbers)):
            _check.fail(where, argument, self.text, numbers)
        return numbers


INPUTS_AND_TARGETS = _check.Where(
    "a pair of inputs and targets",
    lambda value: isinstance(value, (tuple, list)) and len(value) == 2 and value[1] is not None,
)


@_check.arguments(
    loss_fn=_check.Function("(params, batch)"),
    params=parallel.STACKED,
    batches=_check.REPEATABLE,
    make_sampler=_check.Function("(step_size)"),
    validation=INPUTS_AND_TARGETS,
    num_warmup=_check.Whole(0),
    num_draws=_check.Whole(1),
    thin=_check.Whole(1),
    key=_check.Key(needed=True),
    step_sizes=_Ascending(),
    name=_check.kind(str, "a name"),
    steps_per_dispatch=_check.Whole(1),
    check=_check.FLAG,
    progress=_check.FLAG,
)
def find_step_size(
    loss_fn: Callable[[optax.Params, Any], jax.Array],
    params: optax.Params,
    batches: Iterable[Any],
    make_sampler: Callable[[float], optax.GradientTransformation],
    apply_fn: Callable[[optax.Params, Any], Any],
    validation: tuple[Any, Any],
    *,
    likelihood: str | Likelihood,
    num_warmup: int,
    num_draws: int,
    thin: int = 1,
    key: jax.Array | int,
    step_sizes: Sequence[float] = STEP_SIZES,
    name: str = "step size",
    steps_per_dispatch: int = 1,
    check: bool = True,
    progress: bool = True,
) -> StepSizeSearch:
    """Find the step size with which short chains predict validation data best.

    It is a loop of `sample` and `predict`; with each step size from the same start, with the same
    key and as many steps. Sample with the best one, kept constant, from the same start:
    `make_sampler(search.best)`.

    Another number of the sampler is tried likewise, where validation data are to decide: with
    `name="temperature"`, `step_sizes=(0.01, 0.1, 1)` and
    `lambda temperature: optax_smile.psmile(num_data=N, temperature=temperature, key=0)`, or a
    `prior_precision`. A temperature below 1 samples no posterior, and what it predicts better than
    one tells of prior, likelihood or data augmentation (Wenzel et al. 2020, Aitchison 2021).

    Short chains from a good start favour step sizes that hardly leave it: give them the warm-up of
    the run that is planned.

    Args:
        batches: gone through anew for each step size; not an iterator, which cannot be. If they are
            shuffled anew as well, step sizes see different ones.
        make_sampler: gives the sampler with a step size, such as
            `lambda step_size: optax_smile.psmile(step_size, num_data=N, decoherence_length=None)`.
        validation: pair of `inputs` and `targets` for `predict`.
        step_sizes: at least 2, > 0, ascending; the default is for the family of `psmile`.
        name: what these numbers are, for table, picture and errors.
        check: warn of a loss that looks like a sum, see `sample`, once.
        progress: show a progress bar over the step sizes, if tqdm is installed. Other arguments as
            `sample` and `predict`.

    Returns:
        A `StepSizeSearch`: print it, or draw it with `plots.step_size_search`. A step size scores
        -inf if predictions are not finite, or more than 1 % of a chain's gradients.

    Raises:
        ValueError: an argument out of range; no step size that scores more than -inf; as `sample`
            and `predict`.
        KeyboardInterrupt: stopped before the last step size is done.

    Cost: for each step size that of `sample`, which compiles anew, and of `predict`.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> x = jnp.linspace(-1, 1, 20)
        >>> apply_fn = lambda params, x: (params["w"][0] * x + params["w"][1], jnp.zeros(()))
        >>> loss_fn = lambda params, y: jnp.mean((apply_fn(params, x)[0] - y) ** 2) / 2
        >>> search = optax_smile.find_step_size(
        ...     loss_fn, {"w": jnp.eye(2)}, [2 * x],
        ...     lambda size: optax_smile.smile(size, num_data=20, decoherence_length=None),
        ...     apply_fn, (x, 2 * x), likelihood="gaussian", num_warmup=30, num_draws=30,
        ...     key=jax.random.key(0), step_sizes=(0.03, 3.0), progress=False,
        ... )
        >>> search.best
        0.03
    """
    steps: dict[str, Any] = {"num_warmup": num_warmup, "num_draws": num_draws, "thin": thin}
    steps |= {"steps_per_dispatch": steps_per_dispatch}
    samplers = [make_sampler(step_size) for step_size in step_sizes]
    if not isinstance(samplers[0], optax.GradientTransformation):
        rule = "a function that gives a sampler of a step size"
        got = f"one that gives {_check.show(samplers[0])}"
        _check.fail("find_step_size", "make_sampler", rule, got)
    num_ticks = -(-num_warmup // thin) + num_draws

    def judge(snapshots: Snapshots | StoredSnapshots) -> list[np.ndarray]:
        """Log density of all chains together `[input]`, and that of each on average `[chain]`."""
        given = {"likelihood": likelihood, "targets": validation[1], "per": "chain"}
        prediction = predict(apply_fn, snapshots, validation[0], **given)
        densities = prediction.log_density, prediction.each.log_density
        return [np.mean(x.reshape(len(x), -1), axis=1, dtype=float) for x in densities]

    names = {"inputs": "validation", "targets": "validation", "snapshots": "params"}
    parts = "predict", "sample", "Snapshots.from_members"
    called = _check.called("find_step_size", *parts, sampler="make_sampler", **names)
    judge = called(judge)
    start = judge(called(Snapshots.from_members)(params))

    def try_out(step_size: float, sampler: Any) -> tuple[list[np.ndarray], float]:
        """Judge short chains, and count their rejected steps per gradient."""
        given = {**steps, "check": check and not judged, "key": key}
        draws = called(sample)(loss_fn, params, batches, sampler, **given, progress=False)
        if draws.trace["num_gradients"].shape[1] < num_ticks:
            raise KeyboardInterrupt(f"`find_step_size` was stopped at step size {step_size:g}.")
        gradients, rejections, nonfinite = (draws.trace[name][:, -1] for name in COUNTED)
        found = [np.full_like(x, -np.inf) for x in start]
        # Else a chain that cannot leave the start would score like it.
        if np.all(nonfinite <= MOST_NONFINITE * gradients):
            # At the start all was well: what is wrong now are predictions that are not finite.
            with contextlib.suppress(ValueError):
                found = judge(draws)
        return found, np.sum(rejections + nonfinite) / np.sum(gradients)

    judged, rejected = [], []
    with _loop.Bar(len(step_sizes), "step sizes", progress) as bar:
        for number, (step_size, sampler) in enumerate(zip(step_sizes, samplers, strict=True), 1):
            found, share = try_out(step_size, sampler)
            judged.append(found)
            rejected.append(share)
            bar.show(number, last=f"{step_size:.3g}", LPPD=f"{found[0].mean():.4g}")
    density, chain_lppd = (np.stack(found) for found in zip(*judged, strict=True))
    lppd = density.mean(axis=1)
    if np.isneginf(lppd).all():
        rule = "step sizes of which at least one keeps all chains and predictions finite"
        _check.fail("find_step_size", "step_sizes", rule, step_sizes, "Try smaller ones.")
    return StepSizeSearch(
        step_sizes=np.array(step_sizes),
        lppd=lppd,
        standard_error=_standard_error(density - density[np.argmax(lppd)]),
        chain_lppd=chain_lppd,
        rejected=np.array(rejected),
        start_lppd=float(start[0].mean()),
        start_chain_lppd=start[1],
        name=name,
    )


def _standard_error(values: np.ndarray) -> np.ndarray:
    """Standard error of the means of rows; NaN for infinite values, or a single one."""
    number = values.shape[1]
    with np.errstate(invalid="ignore"):
        deviations = values - values.mean(axis=1, keepdims=True)
        return np.sqrt(np.sum(deviations**2, axis=1) / (number * (number - 1)))
