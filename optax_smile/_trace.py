"""Read the trace of a run, arrays `[chain, tick]`, and warn of chains with equal keys."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile._warn import warn

REMEDY = "Pass the `trace` of the draws that `sample` returned."
TRACE = _check.kind(Mapping, "a dict of arrays", REMEDY)


@_check.called("Snapshots")
def of_draws(trace: Mapping[str, ArrayLike], num_draws: int) -> dict[str, np.ndarray]:
    """Restrict a trace to the last `num_draws` ticks that are draws in all chains."""
    arrays = {name: np.asarray(values) for name, values in trace.items()}
    if not arrays:
        return arrays
    shape = next(iter(arrays.values())).shape
    for name, values in arrays.items():
        if values.ndim < 2 or values.shape[:2] != shape[:2]:
            rule = "a dict of arrays [chain, tick] with equal axes"
            _check.fail("trace", rule, f"shape {values.shape} of {name!r}")
    is_draw = np.broadcast_to(arrays.get("is_draw", np.array(True)), shape).astype(bool)
    ticks = np.flatnonzero(is_draw.all(axis=0))
    if len(ticks) < num_draws:
        rule = f"at most {len(ticks)}, the number of draws in the trace"
        _check.fail("num_draws", rule, num_draws)
    return {name: values[:, ticks[-num_draws:]] for name, values in arrays.items()}


def read(trace: Mapping[str, ArrayLike], *names: str) -> list[np.ndarray]:
    """Read entries of a trace as numbers of one shape `[chain, tick]`."""
    if any(name not in trace for name in names):
        rule = f"a dict with {', '.join(map(repr, names))}"
        _check.fail("trace", rule, f"the keys {sorted(trace)}", REMEDY)
    given = {name: _check.host("trace", trace[name]) for name in names}
    shapes = {name: values.shape for name, values in given.items()}
    shape = shapes[names[0]]
    if set(shapes.values()) != {shape} or len(shape) != 2 or 0 in shape:
        rule = "a dict of arrays of one shape [chain, tick] with at least one of each"
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        _check.fail("trace", rule, got, REMEDY)
    return [values.astype(float) for values in given.values()]


def warn_of_equal_keys(noise_id: np.ndarray):
    """Warn of chains with equal keys; `noise_id` is as for `chains_with_equal_keys`."""
    if groups := chains_with_equal_keys(noise_id):
        chains = " and ".join(map(str, groups))
        advice = "Give each chain its own key, as `parallel.init(sampler, params, key=...)` does."
        name = _check.function_name()
        warn(f"`{name}`: the chains {chains} have equal keys and are not independent. {advice}")


def late_share(on_its_way: np.ndarray) -> np.ndarray:
    """Return the share of the ticks `[chain, tick]` in the last third that are not draws yet."""
    return on_its_way[:, -max(1, on_its_way.shape[1] // 3) :].mean(axis=1)


def warn_of_descent(on_its_way: np.ndarray):
    """Warn of chains that are still in their descent."""
    chains = np.flatnonzero(late_share(on_its_way) > 0.5).tolist()
    if chains:
        advice = "Run longer before the first draw, and start from trained weights."
        name = _check.function_name()
        warn(f"`{name}`: the chains {chains} are still on their way to the posterior. {advice}")


def chains_with_equal_keys(noise_id: np.ndarray) -> list[list[int]]:
    """Return the groups of chains whose `Stats.noise_id` `[chain, draw]` are all equal."""
    _, group = np.unique(noise_id, axis=0, return_inverse=True)
    members = [np.flatnonzero(group.ravel() == x).tolist() for x in range(group.max() + 1)]
    return [x for x in members if len(x) > 1 and noise_id[x[0]].any()]
