"""Wrong calls: every argument of every public function in turn replaced by hostile values.

A call may succeed where the value is lawful (`LAWFUL`), or raise an `ArgumentError` that names the
function and the argument. An exception from inside JAX, NumPy or Python, or a success that means
nothing, fails. All of it: `pytest tests/faults --full`.
"""

import inspect
import random
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
from calls import FAMILIES, KEY, PARAMS, family, run_in
from test_imports import public_objects

from optax_smile import ArgumentError
from optax_smile._tree import MISSING_PARAMS

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


# Nothing for users to call: records that functions return, and what the package is made of.
NOT_CALLED = {
    *("Outcome", "Prediction", "Selection", "StoredSnapshots"),
    *("diagnostics.Check", "diagnostics.Summary"),
    *("ArgumentError", "CheckReport", "RecordedSampler", "Stats"),
    # Classes to inherit from.
    *("Preconditioner", "Tuner"),
    *("metrics.Reliability", "metrics.RiskCoverage", "local.PrecisionSearch"),
    "interop.NumpyroModel",
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
    **dict.fromkeys(("aux", "output", "start", "ax", "tuner"), {"none"}),
    **dict.fromkeys(("num_draws", "num_chains", "inputs", "like"), {"none"}),
    "check": {"true"},
    "check.state": {"none"},
    **dict.fromkeys(("flat", "progress", "resume", "stacked", "per_chain"), {"true"}),
    # Any number of the range; traced where a sampler may be built inside a compiled function.
    **dict.fromkeys(("step_size", "temperature", "excess", "angle"), {"tracer"}),
    **dict.fromkeys(("friction", "square_decay", "adapt_probability", "adapt_rate"), {"tracer"}),
    **dict.fromkeys(("smallest_root", "total_steps", "num_cycles"), {"tracer"}),
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
    **dict.fromkeys(("num_warmup", "seed"), {"zero"}),
    # A seed, or a key; none where nothing is drawn.
    "key": {"minus", "zero", "key"},
    "parallel.init.key": {"none", "minus", "zero", "key"},
    # Any tree with two parameters or more; leaves that are no floating arrays stay as they are.
    **dict.fromkeys(("psmile.init.params", "sgld.init.params"), TREES | {"state"}),
    "scale_by_gradient_noise.init.params": TREES | {"tracer"},
    # Anything with a leading axis; what is in it is the business of who calls.
    "parallel.place.tree": TREES | {"nans", "keys"},
    "parallel.step.carry": TREES | {"nans", "keys"},
    "parallel.init.params": TREES,
    **dict.fromkeys(("parallel.init.sampler", "tracked.sampler"), {"optimizer"}),
    # Without a mesh a batch stays as it is.
    "parallel.place_batch.batch": set(HOSTILE),
    "parallel.over_chains.function": {"class", "function"},
    "parallel.over_chains.in_axes": {"none", "zero"},
    "optimizer": {"optimizer"},
    # A number is a batch for a loss that takes one.
    "validation": {"none", *NUMBER},
    "select.validation": set(),
    "directory": {"none", "text"},
    "load_snapshots.directory": {"text"},
    "Snapshots.params": TREES,
    "Snapshots.from_members.params": TREES | {"nans"},
    "trace": set(),
    "Snapshots.trace": {"dict", "ints", "other"},
    "Snapshots.from_draws.draws": set(),
    "Snapshots.from_draws.trace": {"none"},
    "settings": {"none", "dict", "ints", "other"},
    **dict.fromkeys(("mean", "entropy", "variance"), {"none"}),
    **dict.fromkeys(("Likelihood.check", "Likelihood.has_target"), {"none"}),
    "lppd.log_density": NUMBER | {"odd"},
    "std": POSITIVE,
    "report.store.name": {"text"},
    # Shapes count.
    "interop.from_numpyro.batch": {"nans"},
    "report.write.title": {"none", "text"},
    # Rows of an array are batches.
    "local_precision.batches": {"odd"},
    "local_precision.check": {"true"},
    "chains_from_weights.jitter": {"none", "zero", "denormal"},
    "cold_temperature.params": {*TREES, "state", "nans"},
    "fan_in_precision.params": {*TREES, "nans", "tracer"},
    "out_axis": {"minus", "zero"},
    "report.store.scores": {"none", "dict"},
    "label": {"none", "text"},
}
# Whose word it is where a function hands on what it got.
HANDED_ON = {
    # The sampler that was built refuses the parameters of a chain.
    "sample": "smile.init",
    "check": "smile.init",
    "parallel.init": "smile.init",
    # A likelihood is read by who predicts with it.
    "Likelihood": "predict",
    # The draws are held by a container.
    "thinned": "load_snapshots",
}


# What stays: `update` without parameters says what all Optax transformations say.
STAYS = {"psmile.update.params": MISSING_PARAMS, "sgld.update.params": MISSING_PARAMS}


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
        if not isinstance(error, ArgumentError):
            return f"raw {type(error).__name__}: {str(error)[:200]}"
        own = {name, name.rpartition(".")[2], f"{name}.init", f"{name}.update", HANDED_ON.get(name)}
        if error.function not in own:
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
    return run_in(tmp_path_factory.mktemp("arguments") / "run")


# Each success of these compiles or draws: their hostile calls are in the full campaign alone, but
# for a few.
SLOW = ("sample", "check", "warmstart", "select", "predict", "Predictor", "Likelihood")
SLOW += ("report.write", "diagnostics.summary", "local.local_precision")


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
    return draw.sample(pairs, min(len(pairs), 6))


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
    assert not found, "\n".join(f"{at}: {verdict}" for at, verdict in found.items())


def test_the_campaign_is_recorded(full, record):
    """A line in the results, where all of it has run."""
    if not full or set(TOLD) != set(FAMILIES):
        pytest.skip("the quick form")
    verdicts = [verdict for _, found in TOLD.values() for verdict in found]
    raw = sum(verdict.startswith("raw") for verdict in verdicts)
    cases = sum(number for number, _ in TOLD.values())
    record("arguments", cases=cases, raw=raw, silent=verdicts.count("silent"))


def test_every_public_function_is_called(run_of_sample):
    """With a valid value for each of its arguments."""
    called = {
        name: arguments for which in FAMILIES for name, _, arguments in family(which, run_of_sample)
    }
    public = dict(public_objects())
    assert not set(public) - set(called) - NOT_CALLED - {"scale_by_gradient_noise"}
    for name in set(public) & set(called):
        assert set(inspect.signature(public[name]).parameters) == set(called[name]), name
