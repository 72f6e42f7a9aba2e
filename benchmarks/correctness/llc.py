r"""Does `examples/learning_coefficient.py` recover known coefficients? Compared with SGLD.

Models and their exact values are in `known_coefficients.py`. A cell is a model, a seed and a
sampler: `psmile`, the default, which chooses its step size, or `sgld` with one of five. All have
the default number of chains, draws and gradients of the example, which gets only num_data and the
localization.

    python benchmarks/correctness/llc.py --output benchmarks/results/llc.jsonl
"""

import functools

from benchmarks import records
from benchmarks.correctness import known_coefficients
from benchmarks.correctness.known_coefficients import MODELS

import learning_coefficient
import numpy as np

import optax_smile

SEEDS = 0, 1, 2
STEP_SIZES = 1e-7, 1e-6, 1e-5, 1e-4, 1e-3
# Small models spend their time in calls of the compiled step.
STEPS_PER_DISPATCH = 10


def cells_of_models() -> list[records.Cell]:
    """Defaults first, then SGLD at each step size, with one seed: its error is that of the step."""
    ours = records.product(model=MODELS, sampler=["psmile"], seed=SEEDS)
    return ours + records.product(model=MODELS, sampler=["sgld"], step_size=STEP_SIZES, seed=[0])


@functools.cache
def model_of(name: str) -> tuple[known_coefficients.Known, known_coefficients.Exact]:
    """A model and its exact coefficient, computed once."""
    model = MODELS[name]()
    return model, model.exact()


def run_known(cell: records.Cell) -> records.Record:
    """One estimate."""
    model, exact = model_of(cell["model"])
    options = {}
    if cell["sampler"] == "sgld":
        options["make_sampler"] = functools.partial(optax_smile.sgld, cell["step_size"])
    found = learning_coefficient.estimate(
        model.loss_fn,
        model.params,
        model.batches,
        num_data=model.num_data,
        localization=model.localization,
        key=cell["seed"],
        steps_per_dispatch=STEPS_PER_DISPATCH,
        **options,
    )
    result = {
        "exact": exact.value,
        "exact_error": exact.error,
        "asymptotic": model.asymptotic,
        "num_parameters": known_coefficients.size(model.params),
        "num_data": model.num_data,
        "localization": model.localization,
        "num_batches": len(model.batches),
    }
    num_chains, num_draws = found.loss.shape
    plain = found.trace.mean(axis=1)
    estimates = {
        "llc": found.llc,
        "standard_error": found.standard_error,
        # The mean loss without the correction by the balance, the usual estimate.
        "plain": float(plain.mean()),
        "plain_error": float(plain.std(ddof=1) / num_chains**0.5),
        "balance": float(found.balance.mean()),
    }
    return result | {
        # None replaces values that are not finite.
        **{name: value if np.isfinite(value) else None for name, value in estimates.items()},
        "is_balanced": found.is_balanced,
        "findings": list(found.findings),
        "chains": num_chains,
        "draws": num_draws,
    }


def main():
    """Run the cells that are missing."""
    parser = records.parser(__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), help="only this one")
    parser.add_argument("--sampler", choices=("psmile", "sgld"), help="only this one")
    arguments = parser.parse_args()
    wanted = {name: vars(arguments)[name] for name in ("model", "sampler")}
    wanted = {name: value for name, value in wanted.items() if value}
    cells = [cell for cell in cells_of_models() if wanted.items() <= cell.items()]
    records.complete(arguments, cells, run_known, "llc")


if __name__ == "__main__":
    main()
