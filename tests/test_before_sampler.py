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
    "scale(0.5)": (optax.scale(0.5), "multiplied by 0.5"),
    "scale(2)": (optax.scale(2.0), "multiplied by 2"),
    "learning rate": (optax.scale_by_learning_rate(1e-2), "multiplied by -0.01"),
    "schedule": (
        optax.scale_by_schedule(optax.cosine_decay_schedule(0.5, 200)),
        "multiplied by 0.[45]",
    ),
    "decay from 1": (
        optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 20)),
        "multiplied by numbers",
    ),
    "weight decay": (optax.add_decayed_weights(0.1), "with another direction"),
    "little weight decay": (optax.add_decayed_weights(1e-4), "with another direction"),
    "adam": (optax.scale_by_adam(), "with another direction"),
    "rms": (optax.scale_by_rms(), "with another direction"),
    "sign": (optax.scale_by_sign(), "with another direction"),
    "momentum": (optax.trace(0.9), "with another direction"),
    "average": (optax.ema(0.9), "with another direction"),
    "clip of entries": (optax.clip(0.03), "with another direction"),
    "normalized": (optax.normalize_by_update_norm(), "multiplied by"),
    "clip by block": (optax.clip_by_block_rms(0.05), "with another direction"),
    "adaptive clip": (optax.adaptive_grad_clip(0.05), "with another direction"),
    "noise": (optax.add_noise(0.1, 0.5, 0), "with another direction"),
    "every other": (optax.apply_every(2), "with another direction"),
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
INJECTED = optax.inject_hyperparams(optax_smile.sgld, static_args=("key",))
CLIP = optax.clip_by_global_norm
RIGHT = {
    "alone": SAMPLER,
    "identity": optax.chain(optax.identity(), SAMPLER),
    "wide clip": optax.chain(CLIP(1e3), SAMPLER),
    "named": optax.named_chain(("clip", CLIP(1e3)), ("sampler", SAMPLER)),
    "zero_nans": optax.chain(optax.zero_nans(), SAMPLER),
    "accumulated": optax.MultiSteps(SAMPLER, 4),
    "apply_if_finite": optax.apply_if_finite(SAMPLER, 5),
    "injected": INJECTED(1e-5, num_data=NUM_DATA, key=0),
    "frozen leaf": FROZEN,
    "another prior": optax_smile.psmile(
        num_data=NUM_DATA, prior_precision=0, log_prior=lambda w: -jnp.abs(w["w"]).sum(), key=0
    ),
    "two gradients": optax_smile.smile(
        1e-2, num_data=NUM_DATA, integrator="minimal_norm", decoherence_length=None
    ),
    "psmile": optax.chain(CLIP(1e3), optax_smile.psmile(num_data=NUM_DATA, key=0)),
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
