"""Candidate samplers for a trained network, to pass to `select`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import jax
import optax

from optax_smile import _check, _on_host
from optax_smile._types import Options
from optax_smile.local.precision import curvature_precision, norm_precision
from optax_smile.potential import cold_temperature
from optax_smile.samplers.smile import psmile, smile
from optax_smile.stages.spectral import default_axes
from optax_smile.stages.step_size import angle_tuner

# Settings of Muon, as measured in `benchmarks/notes/matrices.md`.
MUON_RATE, MUON_DECAY = 8e-3, 0.02


# `curvature_precision` checks the other arguments.
@_check.arguments(
    optimizer=_check.TRANSFORMATION,
    key=_check.Key(needed=True),
    excess=_check.Real(0, open="low", traced=False),
)
def network_candidates(
    loss_fn: Callable[..., jax.Array],
    params: optax.Params,
    batches: Iterable[object],
    optimizer: optax.GradientTransformation,
    *,
    num_data: float,
    key: jax.Array | int,
    excess: float = 0.08,
    allowed: float = 0.03,
) -> dict[str, optax.GradientTransformation]:
    """Make the usual candidates of `select` for a trained network, a dict that you may extend.

    - `"psmile"`: the default, which samples the Bayesian posterior.
    - `"psmile, cold"`: at `cold_temperature` with longer steps, `angle_tuner(0.3)`; where that
      temperature is 1, it is called `"psmile, long steps"`.
    - `"psmile, around the start"`: with `decoherence_length="turning"`, `angle_tuner(0.1)`, and a
      prior centred at the trained weights, whose precision is that of `curvature_precision`.
    - `"spectral"`: `smile` with `norm="spectral"` and without `decoherence_length`, at
      `cold_temperature`, with the prior precision of `norm_precision`.
    - `"optimizer"`: continues training and averages the predictions of its iterates.
    - `"Muon"`: the same with `optax.contrib.muon` at the rate 8e-3, for arrays of two or more axes,
      whose last one has the columns; AdamW at 1e-3 for the others. Weight decay 0.02.

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, without random numbers.
        params: trained networks, each leaf `[chain, ...]`.
        batches: batches of the data; only the first 20 are read.
        optimizer: your optimizer, such as `optax.adamw(1e-3)`.
        num_data: >= 1, see `psmile`.
        excess: > 0, see `cold_temperature`.
        key: JAX key or seed for the samplers.
        allowed: > 0, see `curvature_precision`.

    Cost: three forward passes per network for each of at most 20 batches.

    Example:
        >>> import jax.numpy as jnp, optax, optax_smile
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params) ** 2)
        >>> given = loss_fn, jnp.ones((2, 3)), [jnp.eye(3)], optax.sgd(0.1)
        >>> list(optax_smile.local.network_candidates(*given, num_data=3, key=0))
        ['psmile', 'psmile, cold', 'psmile, around the start', 'spectral', 'optimizer', 'Muon']
    """
    given = {"num_data": num_data, "allowed": allowed}
    with _check.called("network_candidates", "curvature_precision"):
        precision = curvature_precision(loss_fn, params, batches, **given)
    make = functools.partial(psmile, num_data=num_data, key=key)
    temperature = cold_temperature(num_data, _on_host.shapes_of_one(params), excess)
    cold = make(temperature=temperature, tuner=angle_tuner(0.3))
    spectral: Options = {"norm": "spectral", "decoherence_length": None, "temperature": temperature}
    turning: Options = {"decoherence_length": "turning", "tuner": angle_tuner(0.1)}
    return {
        "psmile": make(),
        "psmile, cold" if temperature < 1 else "psmile, long steps": cold,
        "psmile, around the start": make(prior_mean="start", prior_precision=precision, **turning),
        "spectral": smile(
            num_data=num_data,
            key=key,
            prior_precision=norm_precision(params, temperature),
            **spectral,
        ),
        "optimizer": optimizer,
        "Muon": optax.contrib.muon(
            MUON_RATE,
            weight_decay=MUON_DECAY,
            adam_learning_rate=1e-3,
            muon_weight_dimension_numbers=functools.partial(jax.tree.map, _dimensions),
        ),
    }


def _dimensions(leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
    """Describe a matrix for Muon; None if the leaf is not a matrix."""
    axes = default_axes(leaf)
    return None if axes is None else optax.contrib.MuonDimensionNumbers(*axes)
