"""Baselines of `networks.py` that continue training: checkpoints of AdamW or Muon, SWAG, FGE.

Each is `name(run, options)`, with the numbers that differ from the method's `DEFAULTS` as options.
It returns draws to predict with: `Snapshots` of one chain, whose `settings` have the name and the
options.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import records

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rivals
from experiment import Experiment, Settings, draw

import optax_smile

DEFAULTS: dict[str, dict[str, Any]] = {
    # LeNet's warm start, for every network; others were trained with other settings.
    "checkpoints": {"learning_rate": 1e-3, "weight_decay": 0.02},
    # Its rate is that of matrices; AdamW trains the other parameters at 1e-3.
    "muon": {"learning_rate": 2e-3, "weight_decay": 0.02},
    # Moments of the checkpoints above.
    "swag": {"learning_rate": 1e-3, "weight_decay": 0.02, "rank": 20},
    # Cycles of `thin` steps, from the rate to a tenth of it.
    "fge": {"learning_rate": 2e-3, "weight_decay": 0.02},
}


class Run(NamedTuple):
    """Start and length of a baseline.

    Attributes:
        task: network and data.
        settings: number of gradients, the same as of a sampler; batches are those of
            `experiment.draw` with the same seed.
        start: trained weights of one member `[1, ...]`, as `experiment.warm_start` gives them.
        seed: of the batches and all random numbers.
        directory: folder from which interrupted training resumes.
    """

    task: Experiment
    settings: Settings
    start: Any
    seed: int
    directory: Path


def checkpoints(run: Run, options: Mapping[str, Any]) -> optax_smile.Snapshots:
    """Continue AdamW at a constant rate; keep every `thin`-th weights after the warm-up.

    Options: `learning_rate` and `weight_decay` of `optax.adamw`.
    """
    chosen = _chosen("checkpoints", options)
    return _snapshots("checkpoints", chosen, run.start, _train_on(run, optax.adamw(**chosen)))


def muon(run: Run, options: Mapping[str, Any]) -> optax_smile.Snapshots:
    """Continue with Muon at a constant rate; keep weights as `checkpoints` does.

    Options: `learning_rate` and `weight_decay` of `optax.contrib.muon`.
    """
    chosen = _chosen("muon", options)
    return _snapshots("muon", chosen, run.start, _train_on(run, rivals.muon(**chosen)))


def fge(run: Run, options: Mapping[str, Any]) -> optax_smile.Snapshots:
    """Continue AdamW at a cyclical rate; keep the weights where it is lowest.

    Options: the highest `learning_rate` and `weight_decay`. The rate falls linearly to a tenth
    within the first half of `thin` steps and rises again; weights are kept in the middle.

    Source: Garipov et al., NeurIPS 2018. Differences from the paper: AdamW in place of SGD.
    """
    chosen, thin = _chosen("fge", options), run.settings.thin
    offset = thin - (run.settings.num_warmup + thin // 2) % thin  # draws are in the middle

    def rate(count):
        phase = (count + offset) % thin / thin
        return chosen["learning_rate"] * (0.1 + 0.9 * jnp.abs(1 - 2 * phase))

    draws = _train_on(run, optax.adamw(rate, weight_decay=chosen["weight_decay"]))
    return _snapshots("fge", chosen, run.start, draws)


def swag(run: Run, options: Mapping[str, Any]) -> optax_smile.Snapshots:
    """Draw from a Gaussian with the moments of the checkpoints.

    Half of the covariance is the diagonal one, half that of the last `rank` deviations from the
    mean.

    Options: `learning_rate` and `weight_decay` of `optax.adamw`, and `rank`.

    Source: Maddox et al., NeurIPS 2019. Differences from the paper: AdamW in place of SGD,
    deviations from the final mean in place of the running one.
    """
    chosen = _chosen("swag", options)
    rates = {name: chosen[name] for name in DEFAULTS["checkpoints"]}
    visited = _train_on(run, optax.adamw(**rates))
    random = np.random.default_rng(run.seed)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *visited)
    drawn = rivals.swag_draws(stacked, run.settings.num_draws, chosen["rank"], random)
    draws = [jax.tree.map(lambda x, i=i: x[i], drawn) for i in range(run.settings.num_draws)]
    return _snapshots("swag", chosen, run.start, draws)


METHODS = {"checkpoints": checkpoints, "muon": muon, "swag": swag, "fge": fge}


def _train_on(run: Run, optimizer: optax.GradientTransformation) -> Sequence[Any]:
    """Weights where a sampler would make draws. Moments begin at zero: a warm start keeps none."""
    task, settings, start, seed, directory = run
    kept: dict[str, Any] = {"directory": directory, "check": False, "progress": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`sample`: `sampler` is an optimizer")
        # An interrupted run would be scored as if it were complete.
        warnings.filterwarnings("error", message=records.INTERRUPTED)
        return list(draw(task, settings, start, optimizer, seed, **kept))


def _chosen(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with defaults; unknown ones are refused."""
    if unknown := sorted(set(options) - set(DEFAULTS[method])):
        raise ValueError(f"`{method}` takes the options {list(DEFAULTS[method])}, got {unknown}.")
    return {**DEFAULTS[method], **options}


def _snapshots(
    method: str, chosen: Mapping[str, Any], start: Any, draws: Sequence[Any]
) -> optax_smile.Snapshots:
    """One chain of draws."""
    params = jax.tree.map(lambda *leaves: np.stack(leaves)[None], *draws)
    named = {"name": method, **chosen}
    return optax_smile.Snapshots(params, settings=named, start=jax.tree.map(np.asarray, start))
