"""What surrounds a sampler: `sample` refuses what changes its gradients, and tells clipping."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile

NUM_DATA, SIZE = 200, 5
SAMPLER = optax_smile.sgld(1e-5, num_data=NUM_DATA, key=0)


def batches() -> list[Any]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(10, 20, SIZE)).astype(np.float32)
    y = (x.sum(axis=-1) + generator.normal(size=(10, 20))).astype(np.float32)
    return list(zip(x, y, strict=True))


def mean_loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) / 2


def sample(tx, **given):
    start = {"w": jnp.full((2, SIZE), 0.3).at[1].set(0.7), "b": jnp.zeros(2)}
    steps: dict[str, Any] = {"num_warmup": 24, "num_draws": 3, "thin": 4, "key": 0}
    steps |= {"progress": False, **given}
    return optax_smile.sample(mean_loss, start, batches(), tx, **steps)


DECAY = optax.add_decayed_weights(1e-4)
WRONG = {
    "scale(-1e-3)": (optax.scale(-1e-3), "multiplied by -0.001"),
    "schedule": (
        optax.scale_by_schedule(optax.cosine_decay_schedule(0.5, 200)),
        "multiplied by 0.[45]",
    ),
    "decay from 1": (
        optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 20)),
        "multiplied by numbers",
    ),
    "little weight decay": (optax.add_decayed_weights(1e-4), "with another direction"),
    "adam": (optax.scale_by_adam(), "with another direction"),
    "normalized": (optax.normalize_by_update_norm(), "multiplied by"),
    "clip and decay": (
        optax.chain(optax.clip_by_global_norm(1.0), DECAY),
        "with another direction",
    ),
}
AROUND = {"sum": (optax.MultiSteps(SAMPLER, 2, use_grad_mean=False), "multiplied by 2")}


@pytest.mark.parametrize("name", [*WRONG, *AROUND])
def test_what_changes_the_gradients_is_refused(name):
    if name in AROUND:
        tx, how = AROUND[name]
    else:
        before, how = WRONG[name]
        tx = optax.chain(before, SAMPLER)
    rule = r"`sample\(sampler=...\)` must be .* receives the gradients of the loss, got gradients "
    with pytest.raises(ValueError, match=f"{rule}{how}") as error:
        sample(tx)
    # Nobody is sent from one wrong place to another.
    advice = str(error.value).partition(". ")[2]
    assert advice.startswith("Remove what comes before the sampler.")
    assert "learning rate" in advice and "its prior replaces weight decay" in advice
    assert "put it before" not in str(error.value) and "State" not in str(error.value)


FROZEN = optax.partition({"on": SAMPLER, "off": optax.set_to_zero()}, {"w": "on", "b": "off"})
CLIP = optax.clip_by_global_norm
RIGHT = {
    "accumulated": optax.MultiSteps(SAMPLER, 4),
    "frozen leaf": FROZEN,
    "another prior": optax_smile.sgld(
        1e-5, num_data=NUM_DATA, prior_precision=0, log_prior=lambda w: -w["w"].sum(), key=0
    ),
    "two gradients": optax_smile.smile(
        1e-2, num_data=NUM_DATA, integrator="minimal_norm", decoherence_length=None
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_leaves_them_is_not(name):
    """Warnings are errors."""
    assert sample(RIGHT[name]).num_draws == 3


@pytest.mark.parametrize("norm, every", [(1.0, False), (0.05, True)])
def test_a_clip_that_acts_is_told_with_its_share(norm, every):
    """Also where it shortens every gradient, so that none shows that it is a clip."""
    share = r"100\.0%" if every else r"\d+\.\d%"
    with pytest.warns(UserWarning, match=f"^`sample`: A clip before .* shortens {share} of the"):
        sample(optax.chain(CLIP(norm), SAMPLER))
