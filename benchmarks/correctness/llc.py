r"""The local learning coefficient where it is known, by defaults; and SGLD beside it.

Models and their exact values are in `known_coefficients.py`. A cell is a model, a seed and a
sampler: `psmile`, which is the default and finds its step size, or `sgld` with one of five. All
have as many chains, draws and gradients, those of the defaults of `llc`; only num_data and the
localization are told.

    python benchmarks/correctness/llc.py --output benchmarks/results/llc.jsonl
"""

import functools
import inspect
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import records
from benchmarks.correctness import known_coefficients
from benchmarks.correctness.known_coefficients import MODELS

import numpy as np

import optax_smile
from optax_smile.local import LearningCoefficient, llc

SEEDS = 0, 1, 2
STEP_SIZES = 1e-7, 1e-6, 1e-5, 1e-4, 1e-3
# SGLD has one seed: its errors are a matter of the step size.
SGLD_SEEDS = (0,)
DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(llc).parameters.items()
    if name in ("num_warmup", "thin")
}
# Calls of the compiled step are what small models cost.
STEPS_PER_DISPATCH = 10


def cells_of_models() -> Iterator[dict[str, Any]]:
    """Defaults first, then SGLD at each step size."""
    for model in MODELS:
        for seed in SEEDS:
            yield {"model": model, "sampler": "psmile", "seed": seed}
    for model in MODELS:
        for step_size in STEP_SIZES:
            for seed in SGLD_SEEDS:
                cell = {"model": model, "sampler": "sgld"}
                yield {**cell, "step_size": step_size, "seed": seed}


@functools.cache
def model_of(name: str) -> tuple[known_coefficients.Known, known_coefficients.Exact]:
    """A model and its exact coefficient, computed once."""
    model = MODELS[name]()
    return model, model.exact()


def run_known(cell: dict[str, Any]) -> dict[str, Any]:
    """One estimate."""
    model, exact = model_of(cell["model"])
    options = {}
    if cell["sampler"] == "sgld":
        options["make_sampler"] = functools.partial(optax_smile.sgld, cell["step_size"])
    begun = time.perf_counter()
    found = llc(
        model.loss_fn,
        model.params,
        model.batches,
        num_data=model.num_data,
        localization=model.localization,
        key=cell["seed"],
        progress=False,
        steps_per_dispatch=STEPS_PER_DISPATCH,
        **options,
    )
    told = {
        "exact": exact.value,
        "exact_error": exact.error,
        "asymptotic": model.asymptotic,
        "num_parameters": known_coefficients.size(model.params),
        "num_data": model.num_data,
        "localization": model.localization,
        "num_batches": len(model.batches),
    }
    return told | estimate(found, begun, DEFAULTS["num_warmup"], DEFAULTS["thin"])


def estimate(
    found: LearningCoefficient, begun: float, num_warmup: int, thin: int
) -> dict[str, Any]:
    """What is recorded of a result; None stands for what is not finite."""
    num_chains, num_draws = found.loss.shape
    plain = found.trace.mean(axis=1)
    told = {
        "llc": found.llc,
        "standard_error": found.standard_error,
        # The mean loss alone, without what its balance takes away, as it is estimated elsewhere.
        "plain": float(plain.mean()),
        "plain_error": float(plain.std(ddof=1) / num_chains**0.5),
        "balance": float(found.balance.mean()),
    }
    told = {name: value if np.isfinite(value) else None for name, value in told.items()}
    return told | {
        "is_balanced": found.is_balanced,
        "findings": list(found.findings),
        "gradients": num_chains * (num_warmup + num_draws * thin),
        "chains": num_chains,
        "seconds": time.perf_counter() - begun,
    }


if __name__ == "__main__":
    parser = records.parser(__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), help="one of them")
    parser.add_argument("--sampler", choices=("psmile", "sgld"), help="one of them")
    arguments = parser.parse_args()
    cells = list(cells_of_models())
    for name in ("model", "sampler"):
        wanted = getattr(arguments, name)
        cells = [cell for cell in cells if wanted in (None, cell[name])]
    records.complete(arguments, cells, run_known, told="llc")
