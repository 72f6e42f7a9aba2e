"""Which method for my problem: `examples/compare.py`, recorded.

    digits     of scikit-learn, 8 x 8 pixels, a layer of 64: 4 chains of 4,000 gradients of 128
    energy     UCI, networks 16-16-16: 4 chains of 10,000 gradients of 256
    airfoil    the same

A cell is one problem and seed with all methods, or with those of `--methods`, whose rows take the
place of earlier ones in the tables.

    python benchmarks/prediction/which_method.py --output benchmarks/results/which_method.jsonl

All but digits need `OPTAX_SMILE_DATA`.
"""

from dataclasses import fields
from typing import Any

from benchmarks import records

import compare
import jax
from methods import METHODS

KEPT = ("batch_size", "num_chains", "num_epochs", "num_steps", "num_draws")
KEPT += ("learning_rate", "weight_decay")


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """All methods on one problem with one seed."""
    make = compare.PROBLEMS[cell["problem"]]
    make = compare.short(make) if "smoke" in cell else make
    task = make(cell["seed"])
    (rows,) = compare.compare(make, [cell["seed"]], cell.get("only", METHODS))
    shapes = jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0)))
    return {
        "methods": rows,
        "num_parameters": sum(x.size for x in shapes),
        "num_data": len(task.splits.train[0]),
        "num_validation": len(task.splits.valid[0]),
        "num_test": len(task.splits.test[0]),
        "budget": {x.name: getattr(task, x.name) for x in fields(task) if x.name in KEPT},
    }


def main():
    """Run the cells that are missing, print the tables."""
    parser = records.parser(__doc__, problem=compare.PROBLEMS, seed=range(3))
    parser.add_argument("--smoke", action="store_true", help="run seconds, for no table")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="these alone")
    arguments = parser.parse_args()
    given = {"smoke": arguments.smoke or None, "only": arguments.methods}
    part = {name: value for name, value in given.items() if value is not None}
    cells = [cell | part for cell in records.cells_of(arguments)]
    names = [f"which-method {x}" for x in arguments.problem if not arguments.smoke]
    records.complete(arguments, cells, run_cell, "num_parameters", *names)


if __name__ == "__main__":
    main()
