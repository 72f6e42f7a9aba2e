"""The checks of `sample`, for your own training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _on_host, _settings, _table
from optax_smile._types import Batch, Options, Output, Tree
from optax_smile.chains import _checks
from optax_smile.chains._chains import Chains
from optax_smile.diagnostics.findings import Check
from optax_smile.state import AFTER, AT_REST, samplers

# Most batches that are read, fewest updates, and fewest gradients that the sampler receives.
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
    """One batch or several, converted to a list, and whether there are no others."""

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
    loss_fn: Callable[..., Output],
    params: optax.Params,
    batch: Batch,
    sampler: optax.GradientTransformation,
    *,
    state: Tree = None,
    aux: Tree = None,
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
            The `num_data` of the sampler must be within a factor of 10 of the examples of a list,
            or of its tokens (entries of an integer array `[example, position]`) if the loss is
            their mean, and may not be the size of one of several batches.
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
    settings = _settings.of(sampler, _on_host.shapes_of_one(params))
    if settings is None:
        rule = "a transformation that contains an optax_smile sampler"
        _check.fail("sampler", rule, "one without")
    checks = [*_of_data(batches, is_whole, settings)]
    usable = [part for part in batches if _checks.size(part, False) != 0]
    if usable:
        others = {"aux": aux, "stochastic": stochastic}
        checks += _of_chains(loss_fn, params, usable, is_whole, sampler, state, others)
    return CheckReport(tuple(checks))


def _of_data(batches: list[Batch], is_whole: bool, settings: Options) -> Iterator[Check]:
    """Test the batches."""
    sizes = [_checks.size(part, False) for part in batches]
    empty = [number for number, rows in enumerate(sizes) if rows == 0]
    text = f"batches {empty[:4]} have no examples." if empty else "none."
    advice = "Drop them: the mean over no examples is not a number."
    yield _checks.judge("empty batches", tuple(map(float, empty)), 0.0, not empty, text, advice)
    if len(sizes) > 1:
        yield _checks.unequal([rows for rows in sizes if rows != 0])
    if is_whole and len(batches) % 2 == 0 and _settings.gradients_per_step(settings) == 2:
        text = f"in passes over these {len(batches)}, a batch always gets the same of two weights."
        yield _checks.judge("two gradients", (len(batches),), 1.0, False, text, ALTERNATE)


def _of_chains(
    loss_fn: Callable[..., Output],
    params: optax.Params,
    batches: list[Batch],
    is_whole: bool,
    sampler: optax.GradientTransformation,
    own: Tree,
    others: Options,
) -> Iterator[Check]:
    """Make the tests that need losses and updates; `own` is the state of the loop."""
    sampler, key = optax.with_extra_args_support(sampler), jax.random.key(0)
    hint = _checks.advice_on_axes(params, batches) if own else CHAINED
    try:
        with _check.called("check", "sample", "parallel.place", "parallel.init"):
            chains = Chains(loss_fn, params, sampler, key=key, hint=hint, **others)
    except _check.ArgumentError as error:
        if error.advice != AFTER:
            raise
        yield Check("after the sampler", (), (), 0.0, False, error.advice, f"{error.got}.")
        return
    with _check.called("check", "sample", batches="batch"):
        losses = _on_host.local(chains.losses(batches[0]))
    for number, part in enumerate(batches):
        if reason := chains.misfit(part):
            got, advice = f"batch {number}, which {reason}", _checks.advice_on_single(batches)
            _check.fail("batch", _checks.USABLE, got, advice)
    found = _checks.divisors(batches, chains.counted)
    test = _checks.amount(batches, chains.counted, found) if is_whole else None
    test = test or _checks.at_least(batches[0], chains.counted)
    yield from filter(None, (_checks.unequal_terms(found), test))
    if np.all(np.isfinite(losses)):
        mean = None
        if not others["stochastic"]:
            mean = _checks.check_mean(chains.losses, batches[0], chains.counted, None)
        if isinstance(mean, Check):
            yield mean
        yield from chains.tests(batches[0])
        if isinstance(mean, Check) and len(batches) == 1:
            # Among gradients of equal length, a factor and a clip look the same.
            rows = (_checks.num_rows(batches[0], False) or 0) // 2
            batches = [batches[0], jax.tree.map(lambda x: x[:rows], batches[0])]
    if chains.number > 1:
        yield _of_keys(own, params)
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
    yield from _of_calls(stats, seen, broken)
    if found := _checks.check_aux(seen, chains.like.aux):
        yield found
    if found := _checks.check_step_size(chains.settings, chains.tree.state):
        yield found


def _of_calls(
    stats: dict[str, np.ndarray], seen: _checks.Gradients, broken: list[int]
) -> Iterator[Check]:
    """Test the results of the updates."""
    finite = _checks.check_finite(seen)
    if broken:
        text = f"{finite.text} They come from the batches {broken[:4]}."
        finite = finite._replace(text=text, advice=_checks.NONFINITE, passed=False)
    yield finite
    how = _checks.changed(seen)
    text = f"the sampler receives the gradients of the loss{f' {how}' if how else ''}."
    yield _checks.judge("before the sampler", (), 0.0, not how, text, _checks.BEFORE)
    if not how:
        yield _checks.check_clips(seen)
    text = "leaves that are not sampled move along their gradients."
    if _checks.adds_gradients(seen):
        yield _checks.judge("other leaves", (), 0.0, False, text, AT_REST)
    altered, calls = (int(np.sum(stats[name])) for name in ("num_altered", "num_gradients"))
    text = f"{altered} of {calls} updates were changed."
    yield _checks.judge("after the sampler", (float(altered),), 0.0, not altered, text, AFTER)


def _of_keys(own: optax.OptState, params: optax.Params) -> Check:
    """Find chains of a loop that share their random numbers."""
    keys = optax.tree.get(own, "key", filtering=lambda _, x: jnp.result_type(x) == jnp.uint32)
    alike = _on_host.first_alike(_on_host.local(keys if keys is not None else (own, params)))
    copies = tuple(chain for chain, first in enumerate(alike) if first != chain)
    found = f"chains {list(copies)} use" if copies else "no chains use"
    text = f"{found} the same random numbers as earlier chains."
    advice = "Make their states with `optax_smile.parallel.init(sampler, params, key=...)`."
    values = tuple(float(alike[chain]) for chain in copies)
    return Check("random numbers", copies, values, 0.0, not copies, advice * bool(copies), text)
