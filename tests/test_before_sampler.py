"""What surrounds a sampler: `sample` refuses what changes its gradients, and tells clipping."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import nightly

import optax_smile

NUM_DATA, SIZE = 50, 5
SAMPLER = optax_smile.sgld(1e-5, num_data=NUM_DATA, key=0)
# Single examples, which `sample` does not halve.
BATCHES: Any = np.random.default_rng(0).normal(size=(10, 1, SIZE)).astype(np.float32)


def mean_loss(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"] - batch.sum(axis=1) - 1) ** 2) / 2


def sample(tx):
    start = {"w": jnp.full((2, SIZE), 0.3).at[1].set(0.7), "b": jnp.zeros(2)}
    steps: dict[str, Any] = {"num_warmup": 24, "num_draws": 3, "thin": 4, "key": 0}
    return optax_smile.sample(mean_loss, start, [*BATCHES], tx, progress=False, **steps)


CLIP, DECAY = optax.clip_by_global_norm, optax.add_decayed_weights(1e-4)
COSINE = optax.cosine_decay_schedule(1.0, 20)
WRONG: dict[str, Any] = {
    "multiplied by -0.001": optax.chain(optax.scale(-1e-3), SAMPLER),
    "multiplied by numbers": optax.chain(optax.scale_by_schedule(COSINE), SAMPLER),
    "multiplied by [0-9]": optax.chain(optax.normalize_by_update_norm(), SAMPLER),
    "with another direction": optax.chain(DECAY, SAMPLER),
    "with another dir": optax.chain(CLIP(1.0), DECAY, SAMPLER),
    "multiplied by 2": optax.MultiSteps(SAMPLER, 2, use_grad_mean=False),
}


# The other cases of this file are nightly.
FAST = "multiplied by -0.001", "with another direction", "accumulated"


@pytest.mark.parametrize("how", [x if x in FAST else nightly(x) for x in WRONG])
def test_what_changes_the_gradients_is_refused(how):
    rule = r"`sample\(sampler=...\)` must be .* receives the gradients of the loss, got gradients "
    with pytest.raises(ValueError, match=f"{rule}{how}") as error:
        sample(WRONG[how])
    # Nobody is sent from one wrong place to another.
    advice = str(error.value).partition(". ")[2]
    assert advice.startswith("Remove what comes before the sampler.")
    assert "learning rate" in advice and "its prior replaces weight decay" in advice
    assert "put it before" not in str(error.value) and "State" not in str(error.value)


PARTS: Any = {"on": SAMPLER, "off": optax.set_to_zero()}
PRIOR: dict[str, Any] = {"prior_precision": 0, "log_prior": lambda w: -w["w"].sum(), "key": 0}
RIGHT: dict[str, Any] = {
    "accumulated": optax.MultiSteps(SAMPLER, 4),
    "frozen leaf": optax.partition(PARTS, {"w": "on", "b": "off"}),
    "another prior": optax_smile.sgld(1e-5, num_data=NUM_DATA, **PRIOR),
    "two gradients": optax_smile.smile(
        1e-2, num_data=NUM_DATA, integrator="minimal_norm", decoherence_length=None
    ),
}


@pytest.mark.parametrize("name", [x if x in FAST else nightly(x) for x in RIGHT])
def test_what_leaves_them_is_not(name):
    """Warnings are errors."""
    assert sample(RIGHT[name]).num_draws == 3


ADDED: dict[str, Any] = {
    "masked": (optax.masked(SAMPLER, {"w": True, "b": False}), "in `optax.masked` alone"),
    "identity": (
        optax.partition(PARTS | {"off": optax.identity()}, {"w": "on", "b": "off"}),
        "added",
    ),
    "scaled": (
        optax.partition(PARTS | {"off": optax.scale(0.5)}, {"w": "on", "b": "off"}),
        "added",
    ),
    "flat": (optax.flatten(SAMPLER), "in `optax.flatten`"),
}
BESIDE = optax.partition(PARTS | {"off": optax.adam(1e-3)}, {"w": "on", "b": "off"})


@pytest.mark.parametrize("name", ADDED)
def test_gradients_that_a_wrapper_adds_to_other_leaves_are_refused(name):
    tx, got = ADDED[name]
    with pytest.raises(ValueError, match=rf"`sample\(sampler=...\)` must be .*, got one .*{got}"):
        sample(tx)
    params: Any = {"w": jnp.ones(SIZE), "b": jnp.zeros(())}
    if name in ("identity", "scaled"):
        found = optax_smile.check(mean_loss, params, [*BATCHES], tx).findings
        assert [x.kind for x in found] == ["other leaves"]
    if name == "masked":
        with pytest.raises(ValueError, match=r"`last_accepted\(state=...\)` must .*set_to_zero"):
            optax_smile.last_accepted(tx.init(params), params)


def test_an_optimizer_of_other_leaves_is_not():
    assert sample(BESIDE).num_draws == 3


@pytest.mark.parametrize("norm, share", [(1.0, r"\d+\.\d%"), nightly(0.05, r"100\.0%")])
def test_a_clip_that_acts_is_told_with_its_share(norm, share):
    """Also where it shortens every gradient, so that none shows that it is a clip."""
    with pytest.warns(UserWarning, match=f"^`sample`: A clip before .* shortens {share} of the"):
        sample(optax.chain(CLIP(norm), SAMPLER))
