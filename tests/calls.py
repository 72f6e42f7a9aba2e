"""A valid call of every public function, from which tests of bad input are made."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from matplotlib.figure import Figure
from public_samplers import SAMPLERS, valid_arguments

import optax_smile
from optax_smile import diagnostics, local, metrics, parallel, plots, published, report

KEY = jax.random.key(0)
PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
CHAINS = {"w": jnp.arange(6.0).reshape(2, 3) / 10 + 1, "b": jnp.ones((2, 1))}
LABELS, PROBABILITIES = np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
VECTOR, INPUTS = np.array([0.5, 1.0, 2.0]), jnp.ones((3, 3))
SERIES = np.random.default_rng(0).normal(size=(2, 16, 3))
TRACE = {
    name: np.array([[1.0, 2.0, 3.0]] * 2)
    for name in ("step_size", "energy_change", "num_rejected", "num_gradients")
}
FRESH = object()


def fixed(step_size=1e-2):
    return optax_smile.smile(step_size, num_data=10, decoherence_length=None)


def loss_fn(params, batch):
    return jnp.mean((params["w"] - batch) ** 2) + jnp.sum((params["b"] - 0 * batch.mean()) ** 2)


def apply_fn(params, inputs):
    return inputs * params["w"][None]


def first_steps(sampler):
    """Build, begin, and take one step."""

    def call(**arguments):
        tx = sampler(**arguments)
        return jax.eval_shape(lambda: tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0))

    return call


def samplers():
    for name, sampler in SAMPLERS.items():
        yield name, first_steps(sampler), valid_arguments(sampler, key=KEY)
    for name in ("smile", "psmile", "smile_naive", "psmile_naive"):
        sampler = getattr(published, name)
        yield f"published.{name}", first_steps(sampler), valid_arguments(sampler)
    for name in ("psmile", "sgld"):
        tx: Any = getattr(optax_smile, name)(1e-2, num_data=10, key=KEY)
        yield f"{name}.init", tx.init, {"params": PARAMS}
        given = {"updates": PARAMS, "state": tx.init(PARAMS), "params": PARAMS, "value": 1.0}
        yield f"{name}.update", tx.update, given
    given = {"num_data": 10, "params": PARAMS, "excess": 0.1}
    yield "cold_temperature", optax_smile.cold_temperature, given
    yield "tracked", optax_smile.tracked, {"sampler": fixed()}
    noise = optax_smile.scale_by_gradient_noise()
    yield "scale_by_gradient_noise.init", noise.init, {"params": PARAMS}
    given = {"updates": PARAMS, "state": noise.init(PARAMS)}
    yield "scale_by_gradient_noise.update", noise.update, given
    angles = {"angle": 0.1, "adapt_steps": 3}
    yield "angle_tuner", optax_smile.angle_tuner, angles
    rates = {"adapt_probability": 0.1, "adapt_rate": 0.1, "adapt_steps": 3}
    yield "quantile_tuner", optax_smile.quantile_tuner, rates
    state: Any = optax_smile.sgld(1e-2, num_data=10, key=KEY).init(PARAMS)
    yield "stats", optax_smile.stats, {"state": state}
    yield "last_accepted", optax_smile.last_accepted, {"state": state, "params": PARAMS}


def runs(path):
    sampler = fixed()
    chains: dict[str, Any] = {
        "loss_fn": loss_fn,
        "batches": [jnp.ones(3)],
        "key": KEY,
        "aux": None,
        "stochastic": False,
        "mesh": None,
        "specs": None,
        "directory": None,
        "check": True,
        "checkpoint_minutes": 5.0,
        "progress": False,
    }
    sampled = {"params": CHAINS, "sampler": sampler, "num_warmup": 0, "num_draws": 2, "thin": 1}
    sampled |= {"per_chain": False, "batch_per": "gradient", "steps_per_dispatch": 1}
    sampled |= {"dtype": None}
    yield "sample", optax_smile.sample, chains | sampled
    steps = {"num_warmup", "num_draws", "thin", "progress"}
    begun = {name: x for name, x in (chains | sampled).items() if name not in steps}
    yield "Run", optax_smile.Run, begun
    run = optax_smile.Run(**begun)
    yield "Run.advance", run.advance, {"num_steps": 1, "trace": True}
    yield "Run.draws", run.draws, {"num_draws": 2, "thin": 1}
    checked = {"loss_fn": chains["loss_fn"], "batch": [jnp.ones(3)]}
    checked |= {"params": jax.tree.map(lambda x: x[0], CHAINS)}
    checked |= {"sampler": sampler, "aux": None, "stochastic": False, "state": None}
    yield "check", optax_smile.check, checked
    trained = {"init_fn": lambda key: {"w": jax.random.normal(key, (3,)), "b": jnp.ones(1)}}
    trained |= {"optimizer": optax.adam(1e-2), "num_members": 2, "num_epochs": 1}
    trained |= {"validation": jnp.ones(3), "patience": 1}
    yield "warmstart", optax_smile.warmstart, chains | trained
    searched = {name: chains[name] for name in ("loss_fn", "batches", "key", "progress")}
    searched |= {name: None for name in ("mesh", "specs", "directory", "batch_size")}
    searched |= {"params": CHAINS, "candidates": {"smile": sampler, "sgd": optax.sgd(0.1)}}
    searched |= {"apply_fn": apply_fn, "validation": (INPUTS, LABELS), "thin": 1}
    searched |= {"likelihood": "categorical", "num_warmup": 0, "num_draws": 3}
    searched |= {"stochastic": False, "per_chain": False, "steps_per_dispatch": 1, "check": False}
    searched |= {"largest_cost": 0.5}
    yield "select", optax_smile.select, searched
    weights = {"weights": [PARAMS, PARAMS], "num_chains": 2, "jitter": 0.1, "key": KEY}
    yield "chains_from_weights", optax_smile.chains_from_weights, weights
    loading = {"directory": path, "like": None, "flat": False}
    yield "load_snapshots", optax_smile.load_snapshots, loading
    yield "thinned", optax_smile.load_snapshots(path).thinned, {"every": 2}
    draws = {"params": SERIES, "trace": {}, "settings": None, "start": None}
    yield "Snapshots", optax_smile.Snapshots, draws
    yield "Snapshots.from_members", optax_smile.Snapshots.from_members, {"params": CHAINS}
    states: Any = [optax_smile.sgld(1e-2, num_data=10, key=key).init(PARAMS) for key in (0, 1)]
    stats = jax.tree.map(lambda *x: np.stack(x), *map(optax_smile.stats, states))
    collected = {"draws": [CHAINS, CHAINS], "trace": [stats, stats], "num_chains": 2}
    yield "Snapshots.from_draws", optax_smile.Snapshots.from_draws, collected


def bowl(params, batch):
    return jnp.mean((params["w"] - 1) ** 2) + jnp.mean(params["b"] ** 2) + 0 * jnp.mean(batch)


def around(path):
    given: dict[str, Any] = {"loss_fn": bowl, "params": PARAMS, "batches": [jnp.ones(3)]}
    given |= {"num_data": 100, "key": KEY, "check": True, "progress": False}
    given |= {"make_sampler": functools.partial(optax_smile.sgld, 1e-6)}
    steps = {"num_chains": 2, "num_warmup": 0, "num_draws": 2, "thin": 1}
    searched: dict[str, Any] = given | steps | {"allowed": 0.01, "temperature": 1.0, "max_runs": 1}
    yield "local.local_precision", local.local_precision, searched
    search = local.local_precision(**searched)
    yield "PrecisionSearch.sampler", search.sampler, {"key": KEY}
    given = {"loss_fn": bowl, "params": CHAINS, "batches": [jnp.ones(3)], "num_data": 100}
    given |= {"optimizer": optax.sgd(0.1), "key": KEY, "excess": 0.1, "allowed": 0.1}
    yield "local.network_candidates", local.network_candidates, given
    given = {"params": PARAMS, "scale": 1.0, "out_axis": -1}
    yield "local.fan_in_precision", local.fan_in_precision, given


def predictions(path):
    drawn = {"w": SERIES, "b": SERIES[..., :1]}
    snapshots = optax_smile.Snapshots(drawn, start={"w": SERIES[:, 0], "b": SERIES[:, 0, :1]})
    reading: dict[str, Any] = {"apply_fn": apply_fn, "inputs": INPUTS, "likelihood": "categorical"}
    reading |= {"targets": LABELS, "batch_size": 2, "per": "draw", "mesh": None, "specs": None}
    prediction = optax_smile.predict(snapshots=snapshots, **reading)
    yield "predict", optax_smile.predict, reading | {"snapshots": snapshots}

    def predictor(**arguments):
        made = optax_smile.Predictor(**arguments)
        for params in snapshots:
            made.update(params)
        return made.finalize()

    yield "Predictor", predictor, reading | {"num_chains": 2}
    fresh = optax_smile.Predictor(apply_fn, INPUTS, likelihood="categorical")
    yield "Predictor.update", fresh.update, {"params": PARAMS | {"w": jnp.ones(3)}}
    likelihood = {"mean": lambda x: x, "log_density": lambda x, y: x[:, 0], "entropy": None}
    likelihood |= {"variance": None, "check": None, "has_target": None}

    def by_likelihood(**arguments):
        given: dict[str, Any] = reading | {"likelihood": optax_smile.Likelihood(**arguments)}
        return optax_smile.predict(snapshots=snapshots, **given)

    yield "Likelihood", by_likelihood, likelihood
    given = {"sampler": optax_smile.psmile(num_data=9, key=0), "num_warmup": 0, "thin": 1}
    given |= {"directory": None}
    yield "recorded", optax_smile.recorded, given
    chosen = {"number": 2, "log_density": prediction.each.log_density}
    yield "choose", snapshots.choose, chosen
    looking = {"snapshots": snapshots, "prediction": prediction}
    given = looking | {"max_inputs": 9, "seed": 0}
    yield "diagnostics.summary", diagnostics.summary, given
    yield "diagnostics.to_arviz", diagnostics.to_arviz, looking
    yield "metrics.score", metrics.score, {"prediction": prediction, "targets": LABELS}
    # The run has eight draws of each chain.
    few = prediction._replace(each=jax.tree.map(lambda x: x[:, :8], prediction.each))
    stored = {"directory": path, "name": "test", "prediction": few, "targets": LABELS}
    yield "report.store", report.store, stored | {"scores": None}
    given = {"directory": path, "output": path / "page.html", "title": "a run"}
    yield "report.write", report.write, given


def on_axes(plot):
    """Draw on axes of its own."""
    return lambda ax, **given: plot(ax=Figure().subplots() if ax is FRESH else ax, **given)


def scores():
    classes = {"probabilities": PROBABILITIES, "labels": LABELS}
    for name in ("accuracy", "aurc", "auroc", "brier", "f1", "risk_coverage"):
        yield f"metrics.{name}", getattr(metrics, name), classes
    for name in ("ece", "reliability"):
        yield f"metrics.{name}", getattr(metrics, name), classes | {"num_bins": 3}
    yield "metrics.lppd", metrics.lppd, {"log_density": VECTOR}
    yield "metrics.perplexity", metrics.perplexity, {"log_density": VECTOR}
    foreign = {"inside": VECTOR, "outside": VECTOR}
    yield "metrics.ood_auroc", metrics.ood_auroc, foreign
    yield "metrics.rmse", metrics.rmse, {"mean": VECTOR, "targets": VECTOR}
    normal = {"mean": VECTOR, "std": VECTOR}
    yield "metrics.interval", metrics.interval, normal | {"level": 0.9}
    yield "metrics.crps", metrics.crps, normal | {"targets": VECTOR}
    ends = {"lower": VECTOR, "upper": VECTOR + 1}
    yield "metrics.coverage", metrics.coverage, ends | {"targets": VECTOR}

    selection = optax_smile.Selection(
        best="a",
        draws=cast(Any, None),
        names=("a", "b"),
        num_steps=np.array([10]),
        lppd=np.array([[-2.0, -3]]),
        projected=np.array([[-1.9, -3]]),
        standard_error=np.array([[0, 0.1]]),
        start_lppd=-4.0,
        final_lppd=-1.5,
        total_steps=30,
        cost=0.3,
    )
    drawn: dict[str, Any] = {
        "chain_paths": {"params": SERIES, "start": SERIES[:, 0]},
        "regression_band": {"inputs": VECTOR, "targets": VECTOR, "level": 0.9} | normal,
        "reliability": classes | {"num_bins": 3, "label": "one"},
        "risk_coverage": classes | {"label": "one"},
        "energy_error": {"trace": TRACE},
        "step_size": {"trace": TRACE},
        "selection": {"selection": selection},
    }
    for name, arguments in drawn.items():
        yield f"plots.{name}", on_axes(getattr(plots, name)), arguments | {"ax": FRESH}


def placed():
    tx = fixed()
    where: dict[str, Any] = {"mesh": None, "specs": None}
    yield "parallel.place", parallel.place, {"tree": CHAINS} | where
    given = {"sampler": tx, "params": CHAINS, "key": KEY} | where
    yield "parallel.init", parallel.init, given
    given = {"batch": VECTOR, "mesh": None, "per_chain": False, "stacked": False}
    yield "parallel.place_batch", parallel.place_batch, given
    given = {"function": lambda carry, batch: carry, "carry": CHAINS, "mesh": None}
    yield "parallel.step", parallel.step, given | {"per_chain": False}
    given = {"function": lambda x: x, "mesh": None, "in_axes": 0}
    yield "parallel.over_chains", parallel.over_chains, given


def bridges():
    def model(x):
        mean: Any = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("data", 10, subsample_size=len(x)):
            numpyro.sample("x", dist.Normal(mean, 1), obs=x)

    given = {"model": model, "batch": VECTOR, "num_data": 10, "plate": "data"}
    yield "interop.from_numpyro", optax_smile.interop.from_numpyro, given
    bridge = optax_smile.interop.from_numpyro(**given)
    draws = optax_smile.Snapshots({"mean": np.zeros((1, 2), np.float32)})
    yield "NumpyroModel.constrain", bridge.constrain, {"draws": draws}


FAMILIES: dict[str, Any] = {
    "samplers": samplers,
    "runs": runs,
    "around": around,
    "predictions": predictions,
    "scores": scores,
    "placed": placed,
    "bridges": bridges,
}


def family(name: str, path: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    """Functions with a valid call each; `path` is the directory of a run."""
    made = FAMILIES[name]
    return list(made(path) if name in ("runs", "around", "predictions") else made())


def run_in(path):
    """Write a run of a few draws."""
    steps: dict[str, Any] = {"num_warmup": 0, "num_draws": 8, "progress": False, "key": KEY}
    optax_smile.sample(loss_fn, CHAINS, [jnp.ones(3)], fixed(), directory=path, **steps)
    return path
