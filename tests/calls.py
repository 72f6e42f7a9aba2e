"""A valid call of every public function; tests of bad input are derived from it.

An argument has its default, or the value in `values` for its name, or for function and name.
"""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from public_samplers import valid_arguments
from test_imports import public_objects

import optax_smile
from optax_smile import Likelihood, Predictor, Snapshots

KEY = jax.random.key(0)
PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
CHAINS = {"w": jnp.arange(6.0).reshape(2, 3) / 10 + 1, "b": jnp.ones((2, 1))}
LABELS, PROBABILITIES = np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
VECTOR, INPUTS, BATCHES = np.array([0.5, 1.0, 2.0]), jnp.ones((3, 3)), [jnp.ones(3)]
SERIES = np.random.default_rng(0).normal(size=(2, 16, 3))
TRACED = ("step_size", "energy_change", "num_rejected", "num_gradients")
TRACE = {name: np.array([[1.0, 2.0, 3.0]] * 2) for name in TRACED}
SAMPLER = optax_smile.smile(1e-2, num_data=10, decoherence_length=None)
# Objects that users do not call: records that functions return, classes to inherit from, and
# estimators, which scikit-learn checks in `test_estimators.py`.
NOT_CALLED = """Outcome Prediction Selection StoredSnapshots diagnostics.Check diagnostics.Summary
ArgumentError CheckReport RecordedSampler Stats Preconditioner Tuner metrics.Reliability
metrics.RiskCoverage interop.NumpyroModel interop.estimators
tall.Center scale_by_gradient_noise""".split()


def loss_fn(params, batch):
    return jnp.mean((params["w"] - batch) ** 2) + jnp.sum((params["b"] - 0 * batch.mean()) ** 2)


def bowl(params, batch):
    return jnp.mean((params["w"] - 1) ** 2) + jnp.mean(params["b"] ** 2) + 0 * jnp.mean(batch)


TALL = {"loss_fn": bowl, "batches": [jnp.ones(4), jnp.ones(6)]}


def apply_fn(params, inputs):
    return inputs * params["w"][None]


def model(x):
    mean: Any = numpyro.sample("mean", dist.Normal(0, 1).expand([2]))
    with numpyro.plate("data", 10, subsample_size=len(x)):
        numpyro.sample("x", dist.Normal(mean.sum(), 1), obs=x)


def values(path) -> dict[str, Any]:
    """Valid values of arguments; `path` is the directory of a run."""
    drawn = {"w": SERIES, "b": SERIES[..., :1]}
    snapshots = optax_smile.Snapshots(drawn, start={"w": SERIES[:, 0], "b": SERIES[:, 0, :1]})
    reading: dict[str, Any] = {"apply_fn": apply_fn, "inputs": INPUTS, "likelihood": "categorical"}
    by_draw = {"targets": LABELS, "batch_size": 2, "per": "draw"}
    prediction = optax_smile.predict(snapshots=snapshots, **reading, **by_draw)
    # The run has eight draws of each chain.
    few = prediction._replace(each=jax.tree.map(lambda x: x[:, :8], prediction.each))
    states: Any = [optax_smile.sgld(1e-2, num_data=10, key=key).init(PARAMS) for key in (0, 1)]
    stats = jax.tree.map(lambda *x: np.stack(x), *map(optax_smile.stats, states))
    scores: Any = {"lppd": [[-2.0, -3]], "projected": [[-1.9, -3]], "standard_error": [[0, 0.1]]}
    scores = {name: np.array(x) for name, x in scores.items()} | {"num_steps": np.array([10])}
    scores |= {"start_lppd": -4.0, "final_lppd": -1.5, "total_steps": 30, "cost": 0.3}
    # Values for every function that has such an argument.
    given = {"key": KEY, "params": PARAMS, "state": states[0], "sampler": SAMPLER, "value": 1.0}
    given |= {"loss_fn": loss_fn, "batches": BATCHES, "batch": VECTOR, "optimizer": optax.sgd(0.1)}
    given |= {"num_data": 10, "num_warmup": 0, "num_draws": 3, "num_steps": 1, "thin": 1}
    given |= {"num_members": 2, "num_epochs": 1, "patience": 1, "every": 2}
    given |= {"number": 2, "num_chains": 2, "jitter": 0.1, "weights": [PARAMS] * 2, "max_inputs": 9}
    given |= {"init_fn": lambda key: {"w": jax.random.normal(key, (3,)), "b": jnp.ones(1)}}
    given |= {"candidates": {"sgld": SAMPLER, "sgd": optax.sgd(0.1)}, "updates": PARAMS}
    given |= {"snapshots": snapshots, "prediction": prediction, "validation": (INPUTS, LABELS)}
    given |= {"function": lambda carry, batch: carry, "carry": CHAINS, "tree": CHAINS}
    given |= {"probabilities": PROBABILITIES, "labels": LABELS, "log_density": VECTOR}
    given |= {"inside": VECTOR, "outside": VECTOR, "mean": VECTOR, "std": VECTOR, "trace": TRACE}
    given |= {"lower": VECTOR, "upper": VECTOR + 1, "targets": VECTOR, "model": model, "name": "x"}
    given |= {"selection": optax_smile.Selection("a", snapshots, ("a", "b"), **scores), **reading}
    center = optax_smile.tall.Center(PARAMS, jnp.ones(()), jax.grad(bowl)(PARAMS, VECTOR))
    given |= {"progress": False, "largest_cost": 0.5, "center": center, "data": jnp.ones(10)}
    own: dict[str, dict[str, Any]] = {
        **dict.fromkeys(("predict", "Predictor"), by_draw),
        **dict.fromkeys(("sample", "Run", "parallel.init"), {"params": CHAINS}),
        "select": {"params": CHAINS, "check": False, "batch_size": 2},
        "check": {"params": {"w": jnp.ones(3), "b": jnp.ones(1)}, "batch": BATCHES, "state": None},
        "warmstart": {"validation": jnp.ones(3), "optimizer": optax.adam(0.01)},
        "local.network_candidates": {"params": CHAINS, "loss_fn": bowl},
        "local.curvature_precision": {"params": CHAINS, "loss_fn": bowl},
        **dict.fromkeys(("tall.find_mode", "tall.center_at"), TALL),
        **dict.fromkeys(("tall.control_variate", "tall.stored"), {"loss_fn": bowl}),
        "Predictor.update": {"params": PARAMS | {"w": jnp.ones(3)}},
        "Likelihood": {"mean": lambda x: x, "log_density": lambda x, y: x[:, 0]},
        "choose": {"log_density": prediction.each.log_density},
        "metrics.score": {"targets": LABELS},
        "metrics.temperature": {"targets": np.array([0, 1, 2])},
        "Prediction.tempered": {"targets": LABELS, "temperature": 2.0},
        **dict.fromkeys(("report.write", "load_snapshots"), {"directory": path}),
        "report.write": {"prediction": few, "directory": path, "pictures": {}},
        "Run.advance": {"trace": True},
        "Snapshots": {"params": SERIES, "trace": {}},
        "Snapshots.from_members": {"params": CHAINS},
        "Snapshots.from_draws": {"draws": [CHAINS, CHAINS], "trace": [stats, stats]},
        "plots.chain_paths": {"params": SERIES, "start": SERIES[:, 0]},
        "plots.regression_band": {"inputs": VECTOR},
        "parallel.over_chains": {"function": lambda x: x},
        "NumpyroModel.sample": {"batches": TALL["batches"], "sampler": None},
        "NumpyroModel.constrain": {"draws": optax_smile.Snapshots({"mean": SERIES[..., :2]})},
        "NumpyroModel.to_arviz": {
            "draws": optax_smile.Snapshots({"mean": SERIES[..., :2]}),
            "data": VECTOR,
        },
    }
    return given | {f"{name}.{x}": value for name, of in own.items() for x, value in of.items()}


def first_step(sampler: Any, **arguments):
    """Build a sampler, initialize it, and take one step."""
    tx = sampler(**arguments)
    return jax.eval_shape(lambda: tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0))


def in_pieces(**arguments):
    made = Predictor(**arguments)
    for params in Snapshots({"w": SERIES}):
        made.update(params)
    return made.finalize()


def valid_calls(path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Functions by name, each with a valid value of every argument."""
    given = values(path)
    snapshots, whole = given["snapshots"], (CHAINS, BATCHES, given["sampler"])
    noise, run = optax_smile.scale_by_gradient_noise(), optax_smile.Run(loss_fn, *whole, key=KEY)
    called: dict[str, Any] = {name: f for name, f in public_objects() if name not in NOT_CALLED}
    called |= {"Run.advance": run.advance, "Run.draws": run.draws, "choose": snapshots.choose}
    called |= {"Prediction.tempered": given["prediction"].tempered}
    called |= {"thinned": optax_smile.load_snapshots(path).thinned}
    called |= {"Predictor.update": Predictor(apply_fn, INPUTS, likelihood="categorical").update}
    called |= {f"Snapshots.{x}": getattr(Snapshots, x) for x in ("from_members", "from_draws")}
    bridge = optax_smile.interop.from_numpyro(model, VECTOR, num_data=10)
    called |= {f"NumpyroModel.{x}": getattr(bridge, x) for x in ("constrain", "to_arviz", "sample")}
    for name in ("psmile", "sgld"):
        tx: Any = called[name](1e-2, num_data=10, key=KEY)
        called |= {f"{name}.init": tx.init, f"{name}.update": tx.update}
        given[f"{name}.update.state"] = tx.init(PARAMS)
    given["scale_by_gradient_noise.update.state"] = noise.init(PARAMS)
    called |= {"scale_by_gradient_noise.init": noise.init}
    called |= {
        "scale_by_gradient_noise.update": lambda updates, state: noise.update(updates, state)
    }
    reading = {"apply_fn": apply_fn, "inputs": INPUTS, "targets": LABELS, "per": "draw"}
    reading |= {"num_chains": 2}
    wrappers: dict[str, Any] = {"Predictor": in_pieces}
    wrappers |= {"Likelihood": lambda **x: in_pieces(likelihood=Likelihood(**x), **reading)}
    wrappers |= {"Run": lambda **x: optax_smile.Run(**x).advance(1)}
    wrappers |= {"recorded": lambda **x: optax_smile.recorded(**x).init(PARAMS)}
    for name, f in called.items():
        found = {x: one.default for x, one in inspect.signature(f).parameters.items()}
        found |= {x: given[x] for x in found if x in given}
        found |= {x: given[f"{name}.{x}"] for x in found if f"{name}.{x}" in given}
        found.pop("others", None)
        if "prior_mean" in found:
            own = {"key": KEY} if "key" in found else {}
            found, f = valid_arguments(f, **own), partial(first_step, f)
        yield name, wrappers.get(name, f), found


def run_in(path):
    """Write a run of a few draws."""
    steps: dict[str, Any] = {"num_warmup": 0, "num_draws": 8, "key": KEY, "progress": False}
    optax_smile.sample(loss_fn, CHAINS, BATCHES, SAMPLER, directory=path, **steps)
    return path
