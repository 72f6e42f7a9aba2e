"""Predictions on eight virtual CPU devices, against averages over everything at once."""

from typing import Any

import jax
import numpy as np
import pytest
import scipy.special
from jax.sharding import AxisType
from runs import refused

import optax_smile

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
GENERATOR = np.random.default_rng(0)
CHAINS, DRAWS, NUM_INPUTS, CLASSES = 4, 7, 30, 4
WEIGHTS = GENERATOR.normal(size=(CHAINS, DRAWS, 3, CLASSES)).astype(np.float32) * 3
INPUTS = GENERATOR.normal(size=(NUM_INPUTS, 3)).astype(np.float32)
LABELS = GENERATOR.integers(0, CLASSES, NUM_INPUTS)
PROBABILITIES = scipy.special.softmax(np.einsum("ij,cdjk->cdik", INPUTS, WEIGHTS), -1)
# In the order of snapshots: the first draw of each chain, then the second draws.
IN_ORDER = PROBABILITIES.swapaxes(0, 1).reshape(-1, NUM_INPUTS, CLASSES)


def apply_fn(params: Any, inputs) -> Any:
    return inputs @ params["w"]


def make_mesh(kind, *shape):
    names = ("chain", "data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def density(probabilities):
    return np.log(probabilities[..., np.arange(NUM_INPUTS), LABELS])


def assert_average(got, probabilities):
    """A prediction is the average over probabilities `[snapshot, input, class]`."""
    np.testing.assert_allclose(got.mean, probabilities.mean(0), atol=1e-5)
    np.testing.assert_allclose(got.log_density, density(probabilities.mean(0)), atol=1e-4)
    aleatoric = scipy.special.entr(probabilities).sum(-1).mean(0)
    np.testing.assert_allclose(got.aleatoric, aleatoric, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "kind", "per", "axis"),
    [
        ((8, 1), EXPLICIT, "draw", None),
        ((2, 2, 2), AUTO, "chain", "model"),
        ((2, 2, 2), EXPLICIT, None, "model"),
    ],
)
def test_on_a_mesh(shape, kind, per, axis):
    """Also with classes sharded over devices, where a gather of logits once crashed.

    28 snapshots on 8 rows of devices leave the last rows empty; 2 rows have 2 chains each.
    """
    specs = None if axis is None else {"w": jax.P(None, axis)}
    mesh = make_mesh(kind, *shape)
    given: dict[str, Any] = {"likelihood": "categorical", "targets": LABELS, "batch_size": 16}
    predictor = optax_smile.Predictor(
        apply_fn, INPUTS, mesh=mesh, specs=specs, per=per, num_chains=CHAINS, **given
    )
    # Arrays may change while they wait.
    params = {"w": np.empty_like(WEIGHTS[0, 0])}
    for count, draw in enumerate(optax_smile.Snapshots({"w": WEIGHTS}), start=1):
        params["w"][:] = draw["w"]
        predictor.update(params)
        if count in (4, 20):
            assert_average(predictor.finalize(), IN_ORDER[:count])
    got = predictor.finalize()
    assert_average(got, IN_ORDER)
    if per is not None:
        each = PROBABILITIES if per == "draw" else PROBABILITIES.mean(1)
        np.testing.assert_allclose(got.each.mean, each, atol=1e-5)
        np.testing.assert_allclose(got.each.log_density, density(each), rtol=1e-5, atol=1e-4)


def test_chains_that_do_not_divide_over_the_rows():
    given = apply_fn, optax_smile.Snapshots({"w": WEIGHTS}), INPUTS
    options: dict[str, Any] = {"likelihood": "categorical", "mesh": make_mesh(AUTO, 8)}
    rule = r"`predict\(mesh=...\)` must be .* divides the number of chains, 4"
    refused(rule, optax_smile.predict, *given, **options, per="chain")
