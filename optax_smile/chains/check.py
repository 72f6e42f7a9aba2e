"""The checks of `sample`, for your own training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _on_host, _settings, _table, mistakes
from optax_smile._types import Options
from optax_smile.chains._chains import Chains
from optax_smile.diagnostics.findings import Check
from optax_smile.mistakes.batches import USABLE, advice_on_axes, advice_on_single
from optax_smile.state import AFTER, samplers

# Maximum of batches, minimum of updates, and minimum of gradients that the sampler receives.
MOST_BATCHES, LEAST_CALLS, LEAST_RECEIVED = 256, 8, 3
ALTERNATE = "Shuffle each pass, or drop a batch. `sample` alternates the weights by itself."
CHAINED = (
    "If `params` has a chain axis, pass `state=parallel.init(sampler, params, key=key)` as well."
)


@dataclasses.dataclass(frozen=True, repr=False)
class CheckReport:
    """Result of `check`; print it for sentences. `checks` has all tests, passed or not."""

    checks: tuple[Check, ...]

    @property
    def findings(self) -> tuple[Check, ...]:
        """The failed checks."""
        return tuple(check for check in self.checks if not check.passed)

    def __str__(self) -> str:
        lines = []
        for check in sorted(self.checks, key=lambda check: check.passed):
            result = (
                "wrong" if not check.passed else "skip " if check.bound != check.bound else "ok   "
            )
            lines.append(f"{result} {check.kind}: {check.text}")
            if check.advice:
                lines.append(f"      Try: {check.advice}")
        tests = _table.counted(len(self.checks), "test")
        return "\n".join([*lines, "", f"{len(self.findings)} of {tests} found a mistake."])

    __repr__ = __str__


class _Batches(_check.Constraint):
    """One batch or several, converted to a list and a flag: whether these are all batches."""

    text = "a batch of arrays, or an iterable of at least one batch"

    def __call__(self, argument, value, given=_check.NOTHING):
        is_one = hasattr(value, "shape") or isinstance(value, tuple | dict)
        if not is_one and hasattr(value, "__iter__") and not isinstance(value, str | bytes | type):
            convert = partial(_on_host.as_numeric, argument, copy=not isinstance(value, list))
            batches = [*map(convert, islice(value, MOST_BATCHES + 1))]
            is_whole = isinstance(value, list) and len(batches) <= MOST_BATCHES
            if batches:
                return batches[:MOST_BATCHES], is_whole
            _check.fail(argument, self.text, "no batches")
        leaves = jax.tree.leaves(value)
        if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
            _check.fail(argument, self.text, _check.written(value))
        return [_on_host.as_numeric(argument, value)], False


@_check.arguments(
    params=_check.Tree(),
    batch=_Batches(),
    sampler=_check.TRANSFORMATION,
    state=_check.Where("the state of an optax_smile sampler", samplers) | None,
    aux=_check.Tree() | None,
)
def check(
    loss_fn: Callable[..., object],
    params: optax.Params,
    batch: Any,
    sampler: optax.GradientTransformation,
    *,
    state: object = None,
    aux: object = None,
    stochastic: bool = False,
) -> CheckReport:
    """Test the parts of your own training loop for mistakes that make draws wrong.

    Call it once, before the loop. It makes at least eight updates of its own, and changes none of
    its arguments. You do not need it for `sample`, which makes such tests itself.

    It tests the loss (a sum, weight decay or a prior in it, probabilities in place of logits,
    outputs that broadcast against the targets, a gradient that is stopped, a divisor that depends
    on the batch), `num_data`, the sizes and the order of the batches, numbers that are not finite,
    also in `aux`, what surrounds the sampler (only a clip by the global norm may
    precede it, and nothing may follow), the start (too few data for the parameters), the step size
    (a learning rate is too short), and whether chains share a key or are identical.

    Args:
        loss_fn, aux, stochastic: as for `sample`, of one chain.
        params: initial parameters of the loop.
        batch: one batch (an array, a tuple or a dict of arrays), or a list or another iterable of
            batches, of which `check` reads at most 256. More batches make the tests more reliable.
            The `num_data` of the sampler must be less than 10 times the examples of a list, or
            its tokens (entries of an integer array `[example, position]`) if the loss is their
            mean, and may not be the size of one of several batches, or their number.
        sampler: the complete transformation of the loop, such as an `optax.chain`.
        state: what `init` returned, if the loop runs several chains under `vmap`. Each leaf of
            `state`, `params` and `aux` then has a leading chain axis. None: one chain.

    Returns:
        A `CheckReport`: print it, or use its `findings`, each a `diagnostics.Check`.

    Raises:
        ValueError: an argument out of range, a loss that is not a scalar, no batch, or a
            transformation without a sampler.

    Cost: one gradient per batch, at least eight; five losses, or eight, 40 if there are more than
    2 * num_data / temperature parameters; compiling a few programs.

    Example:
        >>> import jax.numpy as jnp, optax, optax_smile
        >>> loss_fn = lambda w, batch: jnp.sum((batch @ w) ** 2)
        >>> tx = optax.chain(optax.scale(-1e-3), optax_smile.sgld(1e-4, num_data=99, key=0))
        >>> report = optax_smile.check(loss_fn, jnp.ones(3), jnp.eye(9, 3) + 1, tx)
        >>> [finding.kind for finding in report.findings]
        ['mean loss', 'before the sampler']
    """
    # The argument check has converted the batch.
    batches, is_whole = batch
    has_chains = state is not None and bool(np.shape(samplers(state)[0].stats().num_gradients))
    params, aux = jax.tree.map(jnp.asarray, (params, aux))
    if not has_chains:
        params, aux = jax.tree.map(lambda x: x[None], (params, aux))
    if _settings.of(sampler, _on_host.shapes_of_one(params)) is None:
        rule = "a transformation that contains an optax_smile sampler"
        _check.fail("sampler", rule, "one without")
    empty = [x for x, part in enumerate(batches) if _on_host.num_examples(part, False) == 0]
    text = f"batches {empty[:4]} have no examples." if empty else "none."
    advice = "Drop them: the mean over no examples is not a number."
    checks = [Check.of("empty batches", tuple(map(float, empty)), 0.0, not empty, text, advice)]
    if usable := [part for place, part in enumerate(batches) if place not in empty]:
        others = {"aux": aux, "stochastic": stochastic}
        checks += _of_chains(loss_fn, params, usable, is_whole, sampler, state, others)
    return CheckReport(tuple(checks))


def _of_chains(
    loss_fn: Callable[..., object],
    params: optax.Params,
    batches: list[object],
    is_whole: bool,
    sampler: optax.GradientTransformation,
    state: Any,
    others: Options,
) -> Iterator[Check]:
    """Run the tests that need losses and updates; `state` is that of the loop."""
    sampler, key = optax.with_extra_args_support(sampler), jax.random.key(0)
    hint = advice_on_axes(params, batches) if state else CHAINED
    try:
        with _check.called("check", "parallel.place", "parallel.init"):
            chains = Chains(loss_fn, params, sampler, key=key, hint=hint, **others)
    except _check.ArgumentError as error:
        if error.advice != AFTER:
            raise
        yield Check("after the sampler", (), (), 0.0, False, error.advice, f"{error.got}.")
        return
    losses, number = chains.losses, len(batches)
    with _check.called("check", batches="batch"):
        start = losses(chains.tree, batches[0])
    for place, part in enumerate(batches):
        if reason := chains.misfit(part):
            got = f"batch {place}, which {reason}"
            _check.fail("batch", USABLE, got, advice_on_single(batches))
    yield from mistakes.batches.checks(batches, losses, is_whole)
    if is_whole and number % 2 == 0 and chains.gradients_per_step == 2:
        text = f"in passes over these {number}, a batch always gets the same of two weights."
        yield Check.of("two gradients", (number,), 1.0, False, text, ALTERNATE)
    if np.all(np.isfinite(start)):
        mean = mistakes.loss.check_mean(losses, chains.tree, batches[0])
        if isinstance(mean, Check):
            yield mean
        yield from mistakes.before(losses, chains.tree, batches[0])
        if isinstance(mean, Check) and number == 1:
            # If all gradients have the same length, a factor and a clip look the same.
            rows = (_on_host.num_rows(batches[0], False) or 0) // 2
            batches = [batches[0], jax.tree.map(lambda x: x[:rows], batches[0])]
    if chains.number > 1:
        yield mistakes.start.shared_keys(state, params)
    broken, calls, (stats, seen) = [], 0, chains.record()
    while calls < max(LEAST_CALLS, len(batches)) or (
        # Several accumulated gradients count as one.
        np.any(stats["num_gradients"] < LEAST_RECEIVED) and calls < MOST_BATCHES
    ):
        before = seen.num_nonfinite_calls
        chains.advance([batches[calls % len(batches)]])
        stats, seen = chains.record()
        if np.any(seen.num_nonfinite_calls > before) and calls < len(batches):
            broken.append(calls)
        calls += 1
    yield from mistakes.gradients.checks(seen, stats, broken)
    yield from mistakes.gradients.lost_numbers(seen, chains.like.aux)
    yield from mistakes.start.step_size(chains.settings, chains.tree.state)
