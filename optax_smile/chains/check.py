"""What `sample` checks, once, for a training loop of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _settings, _table, _tree
from optax_smile.chains import _data, _gradients, _loop
from optax_smile.chains._chains import Chains
from optax_smile.diagnostics.results import Check
from optax_smile.state import AFTER, SamplerState

# Batches that are looked at, and updates that are made, at least.
MOST_BATCHES, LEAST_CALLS, LEAST_RECEIVED = 256, 8, 3


@dataclasses.dataclass(frozen=True, repr=False)
class CheckReport:
    """What `check` found; `print(report)` says it in plain words.

    Attributes:
        checks: every test that could be made, passed or not.
    """

    checks: tuple[Check, ...]

    @property
    def findings(self) -> tuple[Check, ...]:
        """What looks wrong."""
        return tuple(found for found in self.checks if not found.passed)

    def __str__(self) -> str:
        lines = []
        for found in sorted(self.checks, key=lambda found: found.passed):
            lines.append(f"{'ok   ' if found.passed else 'wrong'} {found.kind}: {found.text}")
            if found.advice:
                lines.append(f"      Try: {found.advice}")
        return "\n".join([*lines, "", self._judgement()])

    def __repr__(self) -> str:
        return str(self)

    def _judgement(self) -> str:
        if not self.findings:
            return f"Nothing looks wrong in {_table.counted(len(self.checks), 'test')}."
        return (
            f"{len(self.findings)} of {_table.counted(len(self.checks), 'test')} found a mistake."
        )


def _may_be_batch(batch: Any) -> bool:
    if isinstance(batch, str | bytes):
        return False
    if hasattr(batch, "__iter__") and not isinstance(batch, tuple | dict):
        return True
    leaves = jax.tree.leaves(batch)
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


def _has_sampler(state: Any) -> bool:
    return bool(_samplers(state))


def _samplers(state: Any) -> list[SamplerState]:
    """States of samplers inside a larger state."""
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, SamplerState))
    return [leaf for leaf in leaves if isinstance(leaf, SamplerState)]


@_check.arguments(
    params=_check.Tree(),
    batch=_check.Where("a batch of arrays, or an iterable of batches", _may_be_batch),
    sampler=_check.TRANSFORMATION,
    num_data=_check.Real(1, large=True, traced=False) | None,
    state=_check.Where("the state of an optax_smile sampler", _has_sampler) | None,
    aux=_check.Tree() | None,
    stochastic=_check.FLAG,
    loss_fn=_loop.Loss(),
)
def check(
    loss_fn: Callable[..., Any],
    params: optax.Params,
    batch: Any,
    sampler: optax.GradientTransformation,
    *,
    num_data: float | None = None,
    state: Any = None,
    aux: Any = None,
    stochastic: bool = False,
) -> CheckReport:
    """Look for the mistakes that make draws wrong, for a training loop of one's own.

    Call it once, before the loop. It makes a few updates of its own, at least eight, and changes
    nothing that it is given. `sample` makes the same tests itself.

    | test | what it looks for |
    |---|---|
    | mean loss | a loss that is a sum over the examples |
    | num_data | the sampler's `num_data` against a batch, the batches, and `num_data` here |
    | batch sizes | batches of different sizes, which weight their examples unequally |
    | empty batches | batches without examples |
    | finite gradients | losses or gradients that are not finite |
    | before the sampler | what changes the gradients: only a clip by the global norm may |
    | clipped gradients | how often that acts |
    | after the sampler | what changes the steps: nothing may |
    | worse than the start | so few data for the parameters that the loss must rise |
    | random numbers | chains that share a key, or are copies of each other |

    Args:
        loss_fn: mean loss `loss_fn(params, batch)` of one chain, a scalar, without the prior. With
            `aux` it is called with `aux=` and returns `(loss, new_aux)`; if `stochastic` it gets
            `key=`.
        params: where the loop starts.
        batch: a list, or another iterable, of batches, of which it takes 256 at most; or one
            batch: an array, a tuple or a dict of arrays. The more, the better: compared with the
            number of examples is `num_data` only in a list of at most 256, and unless it counts
            tokens: where it is about as large as an integer array `[example, position]` of all
            batches together.
        sampler: the transformation of the loop as a whole, such as an `optax.chain`.
        num_data: number of terms that the mean loss averages over the whole data set, examples or
            tokens, >= 1, to compare with that of the sampler.
        state: of the loop before the first step, if chains are vmapped: every leaf of it, of
            `params` and of `aux` has a leading chain axis.
        aux: auxiliary state of the model.
        stochastic: whether the loss draws random numbers.

    Returns:
        A `CheckReport`: print it, or look at its `findings`, each a `diagnostics.Check`.

    Raises:
        ValueError: an argument out of range, a loss that is not a scalar, no batch, or a
            transformation without a sampler.

    Cost: two losses and a gradient for each batch, and eight gradients at least; two programs are
    compiled.

    Example:
        >>> import jax.numpy as jnp, optax, optax_smile
        >>> loss_fn = lambda w, batch: jnp.sum((batch @ w) ** 2)
        >>> tx = optax.chain(optax.scale(-1e-3), optax_smile.psmile(num_data=99, key=0))
        >>> report = optax_smile.check(loss_fn, jnp.ones(3), jnp.eye(9, 3) + 1, tx)
        >>> [finding.kind for finding in report.findings]
        ['mean loss', 'before the sampler']
    """
    batches, is_whole = _batches(batch)
    has_chains = state is not None and bool(np.shape(_samplers(state)[0].stats().num_gradients))
    if not has_chains:
        params, aux = jax.tree.map(lambda x: jnp.asarray(x)[None], (params, aux))
    settings = _settings.of(sampler, jax.tree.map(_shape_of_chain, params))
    if settings is None:
        _check.fail("check", "sampler", "one with an optax_smile sampler", "one without")
    found = [*_of_data(batches, is_whole, settings, num_data)]
    usable = [part for part in batches if _data.size(part, False) != 0]
    if usable:
        found += _of_chains(loss_fn, params, usable, sampler, settings, state, aux, stochastic)
    return CheckReport(tuple(found))


def _batches(batch: Any) -> tuple[list[Any], bool]:
    """The batches, and whether they are all there are."""
    is_one = hasattr(batch, "shape") or isinstance(batch, tuple | dict)
    if is_one or not hasattr(batch, "__iter__"):
        return [batch], False
    batches = list(islice(batch, MOST_BATCHES + 1))
    if not batches:
        _check.fail("check", "batch", "at least one batch", "none")
    is_whole = isinstance(batch, list) and len(batches) <= MOST_BATCHES
    return batches[:MOST_BATCHES], is_whole


def _shape_of_chain(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf)[1:], jnp.result_type(leaf))


def _of_data(
    batches: list[Any], is_whole: bool, settings: Any, num_data: float | None
) -> Iterator[Check]:
    """Tests of the batches."""
    sizes = [_data.size(part, False) for part in batches]
    empty = [number for number, rows in enumerate(sizes) if rows == 0]
    text = f"batches {empty[:4]} have no examples." if empty else "none."
    advice = "Leave them out: the mean over no examples is not a number." if empty else ""
    numbers = tuple(map(float, empty))
    yield Check("empty batches", (), numbers, 0.0, not empty, advice, text)
    if len(sizes) > 1:
        yield _data.unequal([rows for rows in sizes if rows != 0])
    own = settings.get("num_data")
    tests = [_data.at_least(batches[0], own, False)]
    if is_whole:
        tests.append(_data.amount(batches, own, False))
    if num_data is not None and isinstance(own, int | float):
        passed = own == num_data
        text = f"the sampler has num_data={own:g}, and the data set {num_data:g}."
        advice, value = "" if passed else _data.NUM_DATA, (float(own),)
        tests.append(Check("num_data", (), value, float(num_data), passed, advice, text))
    made = [test for test in tests if test is not None]
    # One line for one mistake.
    yield from [test for test in made if not test.passed][:1] or made[-1:]


def _of_chains(
    loss_fn: Callable[..., Any],
    params: Any,
    batches: list[Any],
    sampler: optax.GradientTransformation,
    settings: Any,
    own: Any,
    aux: Any,
    stochastic: bool,
) -> Iterator[Check]:
    """Tests that take losses and updates."""
    sampler = optax.with_extra_args_support(sampler)
    nothing: dict[str, Any] = {"per_chain": False, "mesh": None, "specs": None, "observe": None}
    given: dict[str, Any] = {"aux": aux, "stochastic": stochastic, **nothing}
    try:
        with _check.called("check", "sample", "parallel.place", "parallel.init"):
            chains = Chains(loss_fn, sampler, params, jax.random.key(0), **given)
    except _check.ArgumentError as error:
        if error.advice != AFTER:
            raise
        yield Check("after the sampler", (), (), 0.0, False, error.advice, f"{error.got}.")
        return
    with _check.called("check", "sample", batches="batch"):
        losses = _tree.local(chains.losses(batches[0]))
    is_finite = bool(np.all(np.isfinite(losses)))
    if is_finite:
        mean = None if stochastic else _loop.check_mean(chains.losses, batches[0], False, None)
        yield from (x for x in (mean, chains.check_rise(batches[0], settings)) if x is not None)
        if mean is not None and len(batches) == 1:
            # Gradients of the same length would not tell a factor from a clip.
            rows = (_loop.num_rows(batches[0], False) or 0) // 2
            batches = [batches[0], jax.tree.map(lambda x: x[:rows], batches[0])]
    if chains.number > 1:
        yield _of_keys(own, params)
    broken, calls, (told, seen) = [], 0, chains.look()
    while calls < max(LEAST_CALLS, len(batches)) or (
        # Of several calls accumulated gradients make one.
        np.any(told["num_gradients"] < LEAST_RECEIVED) and calls < MOST_BATCHES
    ):
        before = seen.num_nonfinite_calls
        chains.advance(batches[calls % len(batches)], False)
        told, seen = chains.look()
        if np.any(seen.num_nonfinite_calls > before) and calls < len(batches):
            broken.append(calls)
        calls += 1
    yield from _of_calls(told, seen, broken)


def _of_calls(told: Any, seen: _gradients.Gradients, broken: list[int]) -> Iterator[Check]:
    """Tests of what a few updates did."""
    found = _gradients.check_finite(seen)
    if broken:
        text = f"{found.text} Batches {broken[:4]} gave them."
        found = found._replace(text=text, advice=_gradients.NONFINITE, passed=False)
    yield found
    how = _gradients.changed(seen)
    passed, advice = not how, _gradients.BEFORE if how else ""
    text = f"the sampler receives the gradients of the loss{f' {how}' if how else ''}."
    yield Check("before the sampler", (), (), 0.0, passed, advice, text)
    if passed:
        yield _gradients.check_clips(seen)
    altered = int(np.sum(told["num_altered"]))
    passed, calls = not altered, int(np.sum(told["num_gradients"]))
    text = f"{altered} of {calls} steps did not arrive as the sampler sent them."
    if passed:
        text = "steps arrive as the sampler sends them."
    advice = "" if passed else AFTER
    yield Check("after the sampler", (), (float(altered),), 0.0, passed, advice, text)


def _of_keys(own: Any, params: Any) -> Check:
    """Look for chains of a loop that share their random numbers."""
    keys = optax.tree.get(own, "key", filtering=lambda _, x: jnp.result_type(x) == jnp.uint32)
    alike = _tree.first_alike(_tree.local(keys if keys is not None else (own, params)))
    copies = tuple(chain for chain, first in enumerate(alike) if first != chain)
    text, advice = "each chain has its own.", ""
    if copies:
        text = f"the chains {list(copies)} draw the same random numbers as one before them."
        advice = "Make their states by `optax_smile.parallel.init(sampler, params, key=...)`."
    values = tuple(float(alike[chain]) for chain in copies)
    return Check("random numbers", copies, values, 0.0, not copies, advice, text)
