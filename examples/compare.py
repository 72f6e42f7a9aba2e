"""Which method for my problem: one network, one data set, all methods at equal gradients.

Prints a table (means and standard errors over seeds) and three sentences that say what to use.
Replace the block YOUR PROBLEM below, or pass a function of your own to `compare`. The settings of
every method are chosen by the LPPD of the validation data; test data are for the table alone.

Data: `digits` comes with scikit-learn; `energy` and `airfoil` come from the folder that
OPTAX_SMILE_DATA names. Minutes per seed on one core.

    python examples/compare.py                       # digits, three seeds
    python examples/compare.py --problem energy --seeds 0
"""

import argparse
import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from data import Splits, uci
from methods import METHODS, Problem, Run
from models import FullyConnected
from verdict import cells, sentences

import optax_smile
from optax_smile import metrics

# Inputs that run together.
BATCH_SIZE = 500


# ------------------------------------------------------------------ YOUR PROBLEM: replace this


class Network(nn.Module):
    """A hidden layer with dropout; logits of the ten digits."""

    @nn.compact
    def __call__(self, x, is_random=False):
        """Map images `[input, 64]` to logits `[input, 10]`."""
        x = nn.relu(nn.Dense(64)(x))
        x = nn.Dropout(0.2)(x, deterministic=not is_random)
        return nn.Dense(10)(x)


def digits(seed: int) -> Problem:
    """Small images; the seed makes the split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    inputs, targets = load_digits(return_X_y=True)
    both: Any = (inputs / 16).astype(np.float32), targets.astype(np.int32)
    split: Any = train_test_split(*both, test_size=0.4, random_state=seed)
    x, rest_x, y, rest_y = split
    half = len(rest_x) // 2
    splits = Splits((x, y), (rest_x[:half], rest_y[:half]), (rest_x[half:], rest_y[half:]))
    network = Network()
    return Problem(
        splits=splits,
        init=lambda key: network.init(key, x[:1]),
        apply=network.apply,
        loss=lambda z, y: jnp.mean(optax.softmax_cross_entropy_with_integer_labels(z, y)),
        likelihood="categorical",
        apply_dropout=lambda params, x, key: network.apply(params, x, True, rngs={"dropout": key}),
        last_layer="Dense_1",
        num_epochs=150,
        num_steps=4_000,
        foreign=np.random.default_rng(seed).permuted(splits.test[0], axis=1),
    )


# ------------------------------------------------------------------------------------------- end


def table_of(name: str, seed: int) -> Problem:
    """UCI regression: three layers of 16, and one noise level for all inputs."""
    splits, network = uci(name, seed), FullyConnected((16, 16, 16), 1)

    def init(key):
        return {"network": network.init(key, splits.train[0][:1]), "log_std": jnp.zeros(())}

    def apply(params, x) -> Any:
        outputs: Any = network.apply(params["network"], x)
        return outputs[:, 0], params["log_std"]

    def loss(outputs, y):
        mean, log_std = outputs
        return jnp.mean((y - mean) ** 2) * jnp.exp(-2 * log_std) / 2 + log_std

    given: dict[str, Any] = {"last_layer": "Dense_3", "learning_rate": 1e-2, "batch_size": 256}
    given |= {"num_epochs": 800, "num_steps": 10_000, "num_draws": 50, "steps_per_dispatch": 100}
    return Problem(splits, init, apply, loss, "gaussian", **given)


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "digits": digits,
    "energy": functools.partial(table_of, "energy"),
    "airfoil": functools.partial(table_of, "airfoil"),
}


def short(make: Callable[[int], Problem]) -> Callable[[int], Problem]:
    """Make a problem that every method runs on in seconds, to try whether it runs."""
    few: dict[str, Any] = {"num_chains": 2, "num_epochs": 4, "num_steps": 40, "num_draws": 5}
    return lambda seed: dataclasses.replace(make(seed), steps_per_dispatch=3, **few)


def compare(
    problem: Callable[[int], Problem],
    seeds: Iterable[int] = (0, 1, 2),
    methods: Iterable[str] = tuple(METHODS),
) -> list[dict[str, dict[str, Any]]]:
    """Run methods for every seed, and print what each one reaches.

    Args:
        problem: `problem(seed)`: the seed makes the split, if you like.
        seeds: of the data, the networks and the random numbers.
        methods: keys of `METHODS`; all by default.

    Returns:
        Scores by method, a dict for each seed, for `verdict.cells` and `verdict.sentences`.
    """
    results = []
    for seed in seeds:
        run, rows = Run(problem(seed), seed), {}
        for name in methods:
            rows[name] = row_of(run, name)
            if (reused := METHODS[name].reuses) in rows:
                rows[name]["seconds"] += rows[reused]["seconds"] - run.seconds_of_starts
            found = rows[name].get("lppd", rows[name].get("why"))
            print(f"seed {seed}: {name}: {found}", flush=True)
        results.append(rows)
    return results


def row_of(run: Run, name: str) -> dict[str, Any]:
    """Try the settings of a method, and score the one that predicts validation data best."""
    method, task = METHODS[name], run.problem
    if method.needs and getattr(task, method.needs) is None:
        return {"why": f"needs `{method.needs}`"}
    began, best, runs = time.monotonic(), None, 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`sample`: `sampler` is an optimizer")
        for setting, draws, apply in method.tries(run):
            runs += 1
            valid = predicted(apply, draws, task, *task.splits.valid)
            if valid is not None:
                lppd = float(np.mean(valid.log_density))
                if best is None or lppd > best[0]:
                    best = lppd, setting, draws, apply, valid
    seconds = time.monotonic() - began + (run.seconds_of_starts if method.starts_trained else 0)
    if name in ("single network", "deep ensemble"):
        seconds = run.seconds
    row = {"gradients": run.gradients * method.cost, "runs": runs, "seconds": seconds}
    if best is None:
        return row | {"setting": "", "lppd": -np.inf}
    lppd, setting, draws, apply, valid = best
    inputs, targets = task.splits.test
    predicted(apply, draws, task, inputs, targets)  # compiles
    began = time.monotonic()
    test = predicted(apply, draws, task, inputs, targets)
    row |= {"setting": setting, "validation_lppd": lppd, "passes": len(draws)}
    row |= {"prediction_seconds": time.monotonic() - began}
    if test is None:
        return row | {"lppd": -np.inf}
    row |= scores(task.likelihood, valid, test, task.splits.valid[1], targets)
    if task.foreign is not None:
        foreign = predicted(apply, draws, task, task.foreign)
        if foreign is not None:
            row["auroc"] = metrics.ood_auroc(test.total, foreign.total)
    return row


def predicted(apply: Any, draws: Any, task: Problem, inputs: Any, targets: Any = None) -> Any:
    """Average of the draws' predictions; None if it is not finite."""
    given: dict[str, Any] = {"likelihood": task.likelihood, "batch_size": BATCH_SIZE}
    try:
        found = optax_smile.predict(apply, draws, inputs, targets=targets, **given)
    except ValueError as error:
        if "finite" not in str(error):
            raise
        return None
    return found


def scores(likelihood: str, valid: Any, test: Any, valid_targets: Any, targets: Any) -> dict:
    """Scores on test data; the temperature is fitted on validation data."""
    row = {"lppd": float(np.mean(test.log_density))}
    if likelihood == "gaussian":
        low, high = metrics.interval(test.mean, np.sqrt(test.total), 0.9)
        row["coverage"] = metrics.coverage(low, high, targets)
        return row | {"rmse": metrics.rmse(test.mean, targets)}
    temperature = 1.0
    with contextlib.suppress(ValueError):  # if all labels are predicted, none is the best
        temperature = metrics.temperature(valid, valid_targets)
    row |= {"accuracy": metrics.accuracy(test.mean, targets), "temperature": temperature}
    return row | {
        "ece": metrics.ece(test.mean, targets),
        "ece_tempered": metrics.ece(test.tempered(temperature).mean, targets),
    }


def main():
    """Parse the arguments, run, print the table and the sentences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", default="digits", choices=PROBLEMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--smoke", action="store_true", help="run seconds instead of minutes")
    arguments = parser.parse_args()

    make = PROBLEMS[arguments.problem]
    results = compare(short(make) if arguments.smoke else make, arguments.seeds)
    header, rows = cells(results)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)))
    print("", *sentences(results), sep="\n")


if __name__ == "__main__":
    main()
