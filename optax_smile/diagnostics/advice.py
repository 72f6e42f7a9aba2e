"""Every kind of finding, and what to try: it depends on what chooses the step size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Words in braces are those of the sampler, in `STEP_SIZES`.
ADVICE = {
    "copies": "a start of its own for each chain (`chains_from_weights` with a jitter), and a key"
    " of its own (`parallel.init(key=...)`). Copies count once in R-hat, ESS and Monte Carlo"
    " error.",
    "altered": "the sampler as the last of `optax.chain`, and its updates added to the parameters"
    " as they are: nothing may come after the sampler, neither clipping, a learning rate, weight"
    " decay, a projection nor an average of parameters.",
    "not finite": "a look at the data: are all batches finite, with no empty one among them, and"
    " the gradients of the loss where they are? If they are, {shorter}, or a start closer by.",
    "diverged": "{shorter}, or a start closer by; leave these chains out of the prediction.",
    "frozen": "{longer}.",
    "still on its way": "a larger num_warmup; a start from trained weights, as `warmstart` makes"
    " them.",
    "not settled": "a larger num_warmup, if there is a trend; a larger thin, more draws or"
    " {longer}, if the chain moves too slowly.",
    "slow": "more draws, a larger thin, or {longer}. Averages over all draws are as good as their"
    " Monte Carlo standard error; what they say of single inputs needs more.",
    "different modes": "nothing, for networks, where this is normal: average over all chains, and"
    " do not read R-hat across chains as convergence to one posterior. More chains or"
    " `cyclical_sgld` find more modes.",
    "chains differ": "more draws or a larger thin, if they would meet in time; else as for"
    " different modes: average over all chains, and trust no single one.",
    "worse than the start": "a stronger prior around the start (`local.local_precision` chooses"
    " one) or a lower temperature, if this is to be sampling around trained weights. Else nothing:"
    " with many parameters for few examples single draws are worse than their average, which is"
    " what counts.",
    "rejected steps": "{shorter}, larger batches, or a higher `reject_quantile`, up to 0.9999.",
    "step size": "{steadier}.",
}
STEP_SIZES = {
    "angle_tuner": {
        "shorter": "a smaller `angle_tuner(angle=...)`",
        "longer": "a larger `angle_tuner(angle=...)`",
        "steadier": "a larger num_warmup: the steps of `angle_tuner` follow the gradients, whose"
        " size still changes",
    },
    "quantile_tuner": {
        "shorter": "a smaller step size to begin with",
        "longer": "a sampler with `angle_tuner()`, or with `quantile_tuner(adapt_steps=...)` that"
        " ends early",
        "steadier": "`quantile_tuner(adapt_steps=...)` that ends within num_warmup: it has no fixed"
        " point",
    },
    "other tuner": {
        "shorter": "a tuner that makes shorter steps",
        "longer": "a tuner that makes longer steps",
        "steadier": "a tuner that comes to rest within num_warmup",
    },
    "schedule": {"shorter": "a schedule of smaller steps", "longer": "a schedule of larger steps"},
    "number": {"shorter": "a smaller step size", "longer": "a larger step size"},
}


# What chains suffer from that are slow, and what to add where `change_share` is larger than that.
SLOW, NOISY = ("slow", "not settled", "chains differ"), 0.75
NOISE = " Up to {:.0%} of the gradients is noise of the batches: larger batches allow longer steps."


def advise(kind: str, settings: Mapping[str, Any], change_share: float = float("nan")) -> str:
    """Say what to try against a kind of finding with this sampler.

    Args:
        kind: a key of `ADVICE`.
        settings: of the sampler.
        change_share: see `Stats`, the median of the chains; NaN if unknown.
    """
    advice = ADVICE[kind].format(**STEP_SIZES[chooser(settings)])
    if kind in SLOW and change_share > NOISY:
        advice += NOISE.format(min(change_share, 1))
    return advice


def chooser(settings: Mapping[str, Any]) -> str:
    """Find what chooses the step size, a key of `STEP_SIZES`, in what `Snapshots.settings` hold."""
    tuner = settings.get("tuner")
    if tuner is not None:
        name = tuner.get("name") if isinstance(tuner, Mapping) else None
        return name if name in ("angle_tuner", "quantile_tuner") else "other tuner"
    # A function is a list of its name and what it encloses.
    return "schedule" if isinstance(settings.get("step_size"), list) else "number"


def has_tuner(settings: Mapping[str, Any]) -> bool:
    """Whether the sampler changes the step size itself."""
    return chooser(settings) not in ("schedule", "number")


def fits_energies(settings: Mapping[str, Any]) -> bool:
    """Whether the sampler fits a Gamma distribution to its energy errors."""
    return settings.get("reject_quantile") is not None or chooser(settings) == "quantile_tuner"
