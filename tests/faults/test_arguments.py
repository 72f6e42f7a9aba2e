"""Wrong calls: every argument of every public function in turn replaced by hostile values.

A call may succeed where the value is lawful (`LAWFUL`), or raise in the form of the house, with the
name of the function that was called and that of the argument. An exception from inside JAX, NumPy
or Python, or a success that means nothing, fails. All of it: `pytest tests/faults --full`.
"""

import datetime
import functools
import inspect
import json
import pathlib
import random
import re
import subprocess
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from matplotlib.figure import Figure
from test_imports import public_objects

import optax_smile
from optax_smile import calibrate, diagnostics, local, metrics, parallel, plots, published, report
from optax_smile._tree import MISSING_PARAMS

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

# By name, made anew for each call. A tracer comes from inside a compiled function.
HOSTILE: dict[str, Any] = {
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "minus": lambda: -1,
    "zero": lambda: 0,
    "denormal": lambda: 1e-320,
    "huge": lambda: 10**30,
    "text": lambda: "x",
    "bytes": lambda: b"x",
    "list": lambda: [],
    "dict": lambda: {},
    "object": lambda: object(),
    "class": lambda: dict,
    "function": lambda: lambda: None,
    "true": lambda: True,
    "complex": lambda: 1j,
    "ragged": lambda: [[1.0, 2.0], [3.0]],
    "texts": lambda: np.array(["1", "2", "3"]),
    "empty": lambda: np.zeros((0, 3)),
    "odd": lambda: np.ones((7, 5, 3, 2)),
    "nans": lambda: np.full(3, np.nan),
    "ints": lambda: {"w": jnp.ones((2, 3), int), "b": jnp.ones(3, int)},
    "other": lambda: {"other": jnp.ones((2, 2))},
    "tracer": None,
    "key": lambda: jax.random.key(1),
    "keys": lambda: jax.random.split(KEY, 2),
    "optimizer": lambda: optax.adam(1e-3),
    "state": lambda: optax.adam(1e-3).init(PARAMS),
}


def loss_fn(params, batch):
    return jnp.mean((params["w"] - batch) ** 2) + jnp.sum(params["b"] ** 2)


def apply_fn(params, inputs):
    return inputs * params["w"][None]


def first_steps(sampler):
    """Build, begin, and take one step."""

    def call(**arguments):
        tx = sampler(**arguments)
        return jax.eval_shape(lambda: tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0))

    return call


def samplers():
    common = {"prior_precision": 1.0, "prior_mean": 0.0, "temperature": 1.0, "num_data": 100}
    common |= {"log_prior": None}
    own: dict[str, Any] = {
        "mclmc": {"decoherence_length": 1.0, "integrator": "leapfrog"},
        "sgld": {},
        "psgld": {"square_decay": 0.9, "smallest_root": 1e-3},
        "sghmc": {"friction": 0.1, "friction_step": "exact", "gradient_noise": 0.0},
        "sgnht": {"friction": 0.1},
        "scale_adapted_sghmc": {"friction": 0.1, "adapt_steps": 3},
        "cyclical_sgld": {"total_steps": 8, "num_cycles": 2, "exploration": 0.5},
    }
    naive = {"integrator": "leapfrog", "decoherence_length": None}
    tuned = {"tuner": optax_smile.quantile_tuner(), "reject_quantile": 0.9}
    tuned |= {"reject_momentum": "refresh"}
    own |= {"smile_naive": naive, "psmile_naive": naive}
    own |= {"smile": naive | tuned, "psmile": naive | tuned}
    for name, arguments in own.items():
        given = {"step_size": 1e-2, "key": KEY} | common | arguments
        yield name, first_steps(getattr(optax_smile, name)), given
    for name in ("smile", "psmile", "smile_naive", "psmile_naive"):
        sampler = first_steps(getattr(published, name))
        yield f"published.{name}", sampler, {"step_size": 1e-2} | common
    for name in ("psmile", "sgld"):
        tx: Any = getattr(optax_smile, name)(1e-2, num_data=10, key=KEY)
        yield f"{name}.init", tx.init, {"params": PARAMS}
        given = {"updates": PARAMS, "state": tx.init(PARAMS), "params": PARAMS, "value": 1.0}
        yield f"{name}.update", tx.update, given
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
    sampler = optax_smile.smile_naive(1e-2, num_data=10)
    chains: dict[str, Any] = {
        "loss_fn": loss_fn,
        "batches": [jnp.ones(3)],
        "key": KEY,
        "aux": None,
        "stochastic": False,
        "mesh": None,
        "specs": None,
        "directory": None,
        "accept": (),
        "check": True,
        "checkpoint_minutes": 5.0,
        "progress": False,
    }
    sampled = {"params": CHAINS, "sampler": sampler, "num_warmup": 0, "num_draws": 2, "thin": 1}
    sampled |= {"per_chain": False, "batch_per": "gradient", "steps_per_dispatch": 1}
    sampled |= {"prefetch": 0, "resume": True, "dtype": None, "callback": None, "observe": None}
    yield "sample", optax_smile.sample, chains | sampled
    trained = {"init_fn": lambda key: {"w": jax.random.normal(key, (3,)), "b": jnp.ones(1)}}
    trained |= {"optimizer": optax.adam(1e-2), "num_members": 2, "num_epochs": 1}
    trained |= {"validation": jnp.ones(3), "patience": 1, "per_member": False}
    yield "warmstart", optax_smile.warmstart, chains | trained
    searched = {"loss_fn": loss_fn, "params": CHAINS, "batches": [jnp.ones(3)], "key": KEY}
    searched |= {"make_sampler": lambda size: optax_smile.smile_naive(size, num_data=10)}
    searched |= {"apply_fn": apply_fn, "validation": (INPUTS, LABELS), "thin": 1}
    searched |= {"likelihood": "categorical", "num_warmup": 0, "num_draws": 2}
    searched |= {"step_sizes": (0.01, 0.1), "steps_per_dispatch": 1, "check": False}
    searched |= {"progress": False, "name": "step size"}
    yield "find_step_size", optax_smile.find_step_size, searched
    weights = {"weights": [PARAMS, PARAMS], "num_chains": 2, "jitter": 0.1, "key": KEY}
    yield "chains_from_weights", optax_smile.chains_from_weights, weights
    tuned = {"loss_fn": lambda params: jnp.sum(params["w"] ** 2), "params": PARAMS, "num_data": 9}
    tuned |= {"prior_precision": 1.0, "prior_mean": 0.0, "temperature": 1.0, "key": KEY}
    tuned |= {"integrator": "leapfrog", "num_steps": 30, "log_prior": None}
    tuned |= {"first_step_size": 0.1, "energy_variance": 1e-3}
    yield "tune_mclmc", optax_smile.tune_mclmc, tuned
    loading = {"directory": path, "like": None, "flat": False}
    yield "load_snapshots", optax_smile.load_snapshots, loading
    yield "thinned", optax_smile.load_snapshots(path).thinned, {"every": 2}
    draws = {"params": SERIES, "trace": {}, "settings": None, "start": None}
    yield "Snapshots", optax_smile.Snapshots, draws
    yield "Snapshots.from_members", optax_smile.Snapshots.from_members, {"params": CHAINS}


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
    estimated = {"beta": 0.5, "localization": 1.0, "draws": None, "steps_per_dispatch": 1}
    yield "local.llc", local.llc, given | steps | estimated | {"directory": None}
    given = {"losses_fn": lambda params, x: x @ params["b"], "draws": [PARAMS, PARAMS]}
    given |= {"examples": INPUTS, "queries": INPUTS, "temperature": 1.0, "batch_size": 2}
    yield "local.influence", local.influence, given
    given = {"params": PARAMS, "scale": 1.0, "out_axis": -1}
    yield "local.fan_in_precision", local.fan_in_precision, given
    drawn = {"search": search, "ax": FRESH}
    yield "plots.precision_search", on_axes(plots.precision_search), drawn
    series = np.ones((2, 3))
    found = local.LearningCoefficient(series, series, series, 0.0, 3, 10.0, 1.0, 1.0)
    drawn = {"found": found, "ax": FRESH}
    yield "plots.learning_coefficient", on_axes(plots.learning_coefficient), drawn


def predictions(path):
    drawn = {"w": SERIES, "b": SERIES[..., :1]}
    snapshots = optax_smile.Snapshots(drawn, start={"w": SERIES[:, 0], "b": SERIES[:, 0, :1]})
    reading: dict[str, Any] = {"apply_fn": apply_fn, "inputs": INPUTS, "likelihood": "categorical"}
    reading |= {"targets": LABELS, "batch_size": 2, "per": "draw", "mesh": None, "specs": None}
    prediction = optax_smile.predict(snapshots=snapshots, **reading)
    averaged = {"snapshots": snapshots, "curve": (2,)}
    yield "predict", optax_smile.predict, reading | averaged

    def predictor(**arguments):
        made = optax_smile.Predictor(**arguments)
        for params in snapshots:
            made.update(params)
        return made.finalize()

    yield "Predictor", predictor, reading | {"num_chains": 2}
    fresh = optax_smile.Predictor(apply_fn, INPUTS, likelihood="categorical")
    yield "Predictor.update", fresh.update, {"params": PARAMS | {"w": jnp.ones(3)}}
    likelihood = {"mean": lambda x: x, "log_density": lambda x, y: x[:, 0], "entropy": None}
    likelihood |= {"variance": None, "check": None}

    def by_likelihood(**arguments):
        given: dict[str, Any] = reading | {"likelihood": optax_smile.Likelihood(**arguments)}
        return optax_smile.predict(snapshots=snapshots, **given)

    yield "Likelihood", by_likelihood, likelihood
    looking = {"snapshots": snapshots, "prediction": prediction}
    given = looking | {"max_inputs": 9, "seed": 0}
    yield "diagnostics.summary", diagnostics.summary, given
    yield "diagnostics.to_arviz", diagnostics.to_arviz, looking
    yield "diagnostics.travel", diagnostics.travel, {"params": SERIES, "start": SERIES[:, 0]}
    given = {"params": SERIES, "num_weights": 9, "seed": 0}
    yield "diagnostics.weight_rhat", diagnostics.weight_rhat, given
    yield "diagnostics.rhat", diagnostics.rhat, {"values": SERIES}
    yield "diagnostics.rhat_within", diagnostics.rhat_within, {"values": SERIES}
    yield "diagnostics.ess", diagnostics.ess, {"values": SERIES, "method": "bulk"}
    yield "diagnostics.mcse_lppd", diagnostics.mcse_lppd, {"log_likelihood": SERIES}
    given = {"mean": SERIES[..., None], "classes": True}
    yield "diagnostics.disagreement", diagnostics.disagreement, given
    yield (
        "diagnostics.autocorrelation",
        diagnostics.autocorrelation,
        {
            "values": SERIES,
            "max_lag": 2,
        },
    )
    for name in ("energy_fit", "rejection_rate", "step_size_trend"):
        given = {"trace": TRACE, "num_draws": 2}
        yield f"diagnostics.{name}", getattr(diagnostics, name), given
    yield "report.score", report.score, {"prediction": prediction, "targets": LABELS}
    stored = {"directory": path, "name": "test", "prediction": prediction, "targets": LABELS}
    yield (
        "report.store",
        report.store,
        stored | {"scores": None, "images": np.ones((len(LABELS), 2, 2))},
    )
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
        yield f"metrics.{name}", getattr(metrics, name), classes | {"num_bins": 3, "equal": "mass"}
    yield "metrics.entropy", metrics.entropy, {"probabilities": PROBABILITIES}
    yield "metrics.lppd", metrics.lppd, {"log_density": VECTOR}
    yield "metrics.nll", metrics.nll, {"log_density": VECTOR}
    yield "metrics.perplexity", metrics.perplexity, {"log_density": VECTOR, "mask": VECTOR > 0}
    foreign = {"inside": VECTOR, "outside": VECTOR}
    yield "metrics.fpr95", metrics.fpr95, foreign
    yield "metrics.ood_auroc", metrics.ood_auroc, foreign
    yield "metrics.rmse", metrics.rmse, {"mean": VECTOR, "targets": VECTOR}
    normal = {"mean": VECTOR, "std": VECTOR}
    yield "metrics.interval", metrics.interval, normal | {"level": 0.9}
    yield "metrics.crps", metrics.crps, normal | {"targets": VECTOR}
    ends = {"lower": VECTOR, "upper": VECTOR + 1}
    yield "metrics.interval_width", metrics.interval_width, ends
    yield "metrics.coverage", metrics.coverage, ends | {"targets": VECTOR}

    search = optax_smile.StepSizeSearch(
        np.array([0.1, 1]),
        np.array([-2.0, -3]),
        np.array([0, 0.1]),
        np.array([[-2.5], [-3]]),
        np.array([0, 0.5]),
        -4.0,
        np.array([-5.0]),
    )
    drawn: dict[str, Any] = {
        "chain_paths": {"params": SERIES, "start": SERIES[:, 0]},
        "entropy": {"entropies": {"test": VECTOR}},
        "examples": {"images": np.ones((len(VECTOR), 2, 2)), "mean": VECTOR, "number": 2}
        | {"uncertainty": VECTOR, "targets": VECTOR},
        "lppd": {"log_likelihood": SERIES},
        "regression_band": {"inputs": VECTOR, "targets": VECTOR, "level": 0.9} | normal,
        "reliability": classes | {"num_bins": 3, "label": "one"},
        "risk_coverage": classes | {"label": "one"},
        "energy_error": {"trace": TRACE},
        "rejections": {"trace": TRACE, "nominal": 0.1},
        "step_size": {"trace": TRACE},
        "step_size_search": {"search": search},
    }
    for name, arguments in drawn.items():
        yield f"plots.{name}", on_axes(getattr(plots, name)), arguments | {"ax": FRESH}


def placed():
    tx = optax_smile.smile_naive(1e-2, num_data=10)
    where: dict[str, Any] = {"mesh": None, "specs": None}
    yield "parallel.place", parallel.place, {"tree": CHAINS} | where
    yield "parallel.shardings", parallel.shardings, {"tree": CHAINS} | where
    given = {"sampler": tx, "params": CHAINS, "key": KEY} | where
    yield "parallel.init", parallel.init, given
    given = {"batch": VECTOR, "mesh": None, "per_chain": False, "stacked": False}
    yield "parallel.place_batch", parallel.place_batch, given
    given = {"function": lambda carry, batch: carry, "carry": CHAINS, "mesh": None}
    yield "parallel.step", parallel.step, given | {"per_chain": False}
    given = {"function": lambda x: x, "mesh": None, "in_axes": 0}
    yield "parallel.over_chains", parallel.over_chains, given


def bridges():
    classes = {"probabilities": PROBABILITIES, "labels": LABELS}
    ends = {"smallest": 0.1, "largest": 10.0}
    yield "calibrate.fit_temperature", calibrate.fit_temperature, classes | ends
    given: dict[str, Any] = {"probabilities": PROBABILITIES, "temperature": 2.0}
    yield "calibrate.with_temperature", calibrate.with_temperature, given
    given = classes | {"new_probabilities": PROBABILITIES, "level": 0.5}
    yield "calibrate.prediction_sets", calibrate.prediction_sets, given
    given = {"mean": VECTOR, "std": VECTOR, "targets": VECTOR, "level": 0.5}
    given |= {"new_mean": VECTOR, "new_std": VECTOR}
    yield "calibrate.prediction_intervals", calibrate.prediction_intervals, given
    sets = PROBABILITIES > 0.2
    yield "calibrate.set_coverage", calibrate.set_coverage, {"sets": sets, "labels": LABELS}
    yield "calibrate.set_size", calibrate.set_size, {"sets": sets}

    def model(x):
        mean: Any = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("data", 10, subsample_size=len(x)):
            numpyro.sample("x", dist.Normal(mean, 1), obs=x)

    given = {"model": model, "batch": VECTOR, "num_data": 10, "plate": "data"}
    yield "interop.from_numpyro", optax_smile.interop.from_numpyro, given


FAMILIES: dict[str, Any] = {
    "samplers": samplers,
    "runs": runs,
    "around": around,
    "predictions": predictions,
    "scores": scores,
    "placed": placed,
    "bridges": bridges,
}
# Nothing for users to call: records that functions return, and what the package is made of.
NOT_CALLED = {
    *("MclmcSettings", "Outcome", "Prediction", "StepSizeSearch", "StoredSnapshots"),
    *("diagnostics.EnergyFit", "diagnostics.Check", "diagnostics.Summary"),
    *("metrics.Reliability", "metrics.RiskCoverage", "parallel.Carry"),
    # Called with what the package has checked.
    *("parallel.check_mesh", "parallel.num_chains"),
    *("parallel.chain_sharding", "parallel.split_key"),
    *("local.PrecisionSearch", "local.LearningCoefficient", "interop.NumpyroModel"),
    # A module of classes that scikit-learn checks: `test_estimators.py`.
    "interop.estimators",
}

# What an argument may be besides the value of the valid call: by its name, or by function and name.
NUMBER, POSITIVE, TREES = (
    {"minus", "zero", "denormal", "true"},
    {"denormal", "true"},
    {"odd", "other"},
)
LAWFUL: dict[str, set[str]] = {
    # What a function gives without it.
    **dict.fromkeys(("mesh", "specs", "per", "targets", "batch_size", "prediction"), {"none"}),
    **dict.fromkeys(("callback", "dtype", "aux", "mask", "output", "start", "ax"), {"none"}),
    **dict.fromkeys(("tuner", "num_draws", "num_chains", "inputs", "like"), {"none"}),
    "accept": {"list"},
    "check": {"true"},
    **dict.fromkeys(("flat", "progress", "resume", "classes", "stacked", "per_chain"), {"true"}),
    # Any number of the range; traced where a sampler may be built inside a compiled function.
    **dict.fromkeys(("step_size", "temperature", "smallest_root", "angle"), {"tracer"}),
    **dict.fromkeys(("friction", "square_decay", "adapt_probability", "adapt_rate"), {"tracer"}),
    **dict.fromkeys(("first_step_size", "energy_variance"), {"tracer"}),
    **dict.fromkeys(("total_steps", "num_cycles"), {"tracer"}),
    **dict.fromkeys(("exploration", "gradient_noise"), {"zero", "denormal", "tracer"}),
    "num_data": {"huge", "tracer"},
    "decoherence_length": {"none", "tracer"},
    "reject_quantile": {"none", "tracer"},
    "adapt_steps": {"none", "tracer"},
    "quantile_tuner.adapt_steps": {"none", "zero", "tracer"},
    "prior_precision": {"zero", "denormal", "ints", "tracer"},
    "prior_mean": {"minus", "zero", "denormal", "ints", "tracer"},
    "log_prior": {"none"},
    "value": {"none", "nan", "inf", "minus", "zero", "denormal", "huge", "tracer"},
    "checkpoint_minutes": {"inf", "zero", "denormal"},
    "jitter": {"zero", "denormal"},
    **dict.fromkeys(("max_lag", "num_warmup", "prefetch", "seed"), {"zero"}),
    **dict.fromkeys(("level",), set()),
    "nominal": {"none", "zero", "denormal"},
    # A seed, or a key; none where nothing is drawn.
    "key": {"minus", "zero", "key"},
    **dict.fromkeys(
        ("smile_naive.key", "psmile_naive.key", "parallel.init.key"),
        {"none", "minus", "zero", "key"},
    ),
    # Any tree of two parameters or more.
    **dict.fromkeys(("psmile.init.params", "sgld.init.params"), TREES),
    "scale_by_gradient_noise.init.params": TREES | {"tracer"},
    # Anything with a leading axis; what is in it is the business of who calls.
    **dict.fromkeys(("parallel.place.tree", "parallel.shardings.tree"), TREES | {"nans", "keys"}),
    **dict.fromkeys(("parallel.step.carry",), TREES | {"nans", "keys"}),
    "parallel.init.params": TREES,
    "parallel.init.sampler": {"optimizer"},
    # Without a mesh a batch stays as it is.
    "parallel.place_batch.batch": set(HOSTILE),
    "parallel.over_chains.function": {"class", "function"},
    "parallel.over_chains.in_axes": {"none", "zero"},
    "optimizer": {"optimizer"},
    # A number is a batch for a loss that takes one.
    "validation": {"none", *NUMBER},
    "find_step_size.validation": set(),
    "directory": {"none", "text"},
    "load_snapshots.directory": {"text"},
    "Snapshots.params": TREES,
    "Snapshots.from_members.params": TREES | {"nans"},
    "trace": set(),
    "Snapshots.trace": {"dict", "ints", "other"},
    "settings": {"none", "dict", "ints", "other"},
    "curve": {"list", "dict", "empty"},
    **dict.fromkeys(("mean", "entropy", "variance", "check"), {"none"}),
    # Arrays of numbers: draws that do not move have no figure, which is no error.
    **dict.fromkeys(("diagnostics.rhat.values", "diagnostics.ess.values"), {"odd"}),
    **dict.fromkeys(("diagnostics.autocorrelation.values",), {"odd"}),
    "diagnostics.disagreement.mean": {"odd"},
    "diagnostics.weight_rhat.params": TREES,
    "diagnostics.travel.start": set(),
    "diagnostics.mcse_lppd.log_likelihood": set(),
    **dict.fromkeys(("lppd.log_density", "nll.log_density"), NUMBER | {"odd"}),
    "plots.lppd.log_likelihood": set(),
    **dict.fromkeys(("std", "new_std"), POSITIVE),
    "report.store.name": {"text"},
    # Shapes count.
    "interop.from_numpyro.batch": {"nans"},
    "report.store.images": {"none"},
    "report.write.title": {"none", "text"},
    "plots.examples.mean": set(),
    # Rows of an array are batches.
    **dict.fromkeys(("local_precision.batches", "llc.batches"), {"odd"}),
    **dict.fromkeys(("local_precision.check", "llc.check"), {"true"}),
    **dict.fromkeys(("llc.beta", "llc.draws", "queries", "influence.temperature"), {"none"}),
    "localization": {"zero", "denormal"},
    "fan_in_precision.params": {*TREES, "nans", "tracer"},
    "out_axis": {"minus", "zero"},
    "report.store.scores": {"none", "dict"},
    "label": {"none", "text"},
}
# Whose word it is where a function hands on what it got.
HANDED_ON = {
    # The sampler that was built refuses the parameters of a chain.
    "sample": "smile_naive.init",
    "parallel.init": "smile_naive.init",
    # A likelihood is read by who predicts with it.
    "Likelihood": "predict",
    # The draws are held by a container.
    "thinned": "load_snapshots",
}


# What stays: `update` without parameters says what all Optax transformations say.
STAYS = {"psmile.update.params": MISSING_PARAMS, "sgld.update.params": MISSING_PARAMS}


def family(name: str, path: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    """Functions with a valid call each."""
    made = FAMILIES[name]
    return list(made(path) if name in ("runs", "around", "predictions") else made())


def attempt(function: Any, arguments: dict[str, Any], which: str, value: str):
    """Call with a hostile value in place of an argument."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UserWarning)
        if value == "tracer":
            jax.eval_shape(lambda x: (function(**arguments | {which: x}), 0)[1], 1.0)
        else:
            function(**arguments | {which: HOSTILE[value]()})


def judge(name: str, function: Any, arguments: dict[str, Any], which: str, value: str) -> str:
    """`right` for an error in the form or a lawful call, else what happened instead."""
    try:
        attempt(function, arguments, which, value)
    except Exception as error:
        if str(error) == STAYS.get(f"{name}.{which}"):
            return "right"
        form = re.match(r"`([\w.]+)\((\w+)[^=]*=\.\.\.\)` must be ", str(error))
        if not isinstance(error, ValueError) or form is None:
            return f"raw {type(error).__name__}: {str(error)[:200]}"
        own = {name, name.rpartition(".")[2], f"{name}.init", f"{name}.update", HANDED_ON.get(name)}
        if form[1] not in own:
            return f"raw, of a function that was not called: {str(error)[:200]}"
        told = "likelihood" if name == "Likelihood" else which
        return "right" if re.search(rf"\b{told}\b", str(error)) else f"raw, unnamed: {error}"
    lawful = LAWFUL.get(f"{name}.{which}", LAWFUL.get(name.rpartition(".")[2] + "." + which))
    return (
        "right" if value in (LAWFUL.get(which, set()) if lawful is None else lawful) else "silent"
    )


@pytest.fixture(scope="module")
def run_of_sample(tmp_path_factory):
    """Directory of a run."""
    path = tmp_path_factory.mktemp("arguments") / "run"
    sampler = optax_smile.smile_naive(1e-2, num_data=10)
    steps: dict[str, Any] = {"num_warmup": 0, "num_draws": 8, "progress": False, "key": KEY}
    optax_smile.sample(loss_fn, CHAINS, [jnp.ones(3)], sampler, directory=path, **steps)
    return path


# Each success of these compiles or draws: their hostile calls are in the full campaign alone, but
# for a few.
SLOW = ("sample", "warmstart", "find_step_size", "tune_mclmc", "predict", "Predictor", "Likelihood")
SLOW += ("report.write", "diagnostics.summary", "local.local_precision", "local.llc")


RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "faults.jsonl"
# Number of calls of each family, and what went wrong.
TOLD: dict[str, tuple[int, list[str]]] = {}


def chosen(name: str, arguments: dict[str, Any], full: bool) -> list[tuple[str, str]]:
    """Pairs of an argument and the hostile value in its place."""
    pairs = [(which, value) for which in arguments for value in HOSTILE]
    if full:
        return pairs
    draw = random.Random(name)
    if name in SLOW:
        lawful = {which: LAWFUL.get(which, set()) for which in arguments}
        pairs = [(which, value) for which, value in pairs if value not in lawful[which]]
    return draw.sample(pairs, min(len(pairs), 10))


@pytest.mark.parametrize("which", FAMILIES)
def test_wrong_calls(which, run_of_sample, full, tmp_path, monkeypatch):
    found, number = {}, 0
    for name, function, arguments in family(which, run_of_sample):
        # Where the text "x" is a directory.
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        if full or name not in SLOW:
            function(**arguments)
        for argument, value in chosen(name, arguments, full):
            verdict, number = judge(name, function, arguments, argument, value), number + 1
            if verdict != "right":
                found[name, argument, value] = verdict
    # Without `ax` a plot opens a figure.
    plt.close("all")
    TOLD[which] = number, list(found.values())
    assert not found


def test_the_campaign_is_recorded(full):
    """A line in the results, where all of it has run."""
    if not full or set(TOLD) != set(FAMILIES):
        pytest.skip("the quick form")
    verdicts = [verdict for _, found in TOLD.values() for verdict in found]
    commit = ["git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD"]
    line = {
        "campaign": "arguments",
        "cases": sum(number for number, _ in TOLD.values()),
        "raw": sum(verdict.startswith("raw") for verdict in verdicts),
        "silent": verdicts.count("silent"),
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "command": "python -m pytest tests/faults/test_arguments.py --full",
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_every_public_function_is_called(run_of_sample):
    """With a valid value for each of its arguments."""
    called = {
        name: arguments for which in FAMILIES for name, _, arguments in family(which, run_of_sample)
    }
    public = dict(public_objects())
    assert not set(public) - set(called) - NOT_CALLED - {"scale_by_gradient_noise"}
    for name in set(public) & set(called):
        assert set(inspect.signature(public[name]).parameters) == set(called[name]), name
