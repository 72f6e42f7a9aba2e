"""What the paper's large rows take: parameters, operations, memory and hours to expect on a GPU.

Nothing is run on a GPU. XLA counts the operations of a gradient at the paper's batch size, and its
memory as compiled for a CPU; the samplers of the paper take two gradients per step. The hours
assume that the GPU reaches `TERAFLOPS` on average.

    python benchmarks/cost/large_rows.py --output benchmarks/results/large_rows.jsonl
"""

import dataclasses
from typing import Any

from benchmarks import records
from benchmarks.prediction.network_cells import SCRIPTS
from benchmarks.prediction.network_chains import BUILDS

import jax

# Of an A100 whose peak is 312 in bfloat16, in which these networks compute.
TERAFLOPS = 60.0
GRADIENTS_PER_STEP = 2
# The state of `psmile` with the parameters and a gradient, float32 numbers per parameter.
ARRAYS = 5
SMALL = 64
NETWORKS = ("resnet18", "vit", "nanogpt")


def run_cell(cell: records.Cell) -> dict[str, Any]:
    """Compile the gradient of a network at the paper's batch size."""
    settings = SCRIPTS[cell["network"]].PRESETS["paper"]
    # The folder of data has small images of Imagenette.
    task = BUILDS[cell["network"]](dataclasses.replace(settings, pixels=SMALL))
    size = settings.sampling_batch_size
    inputs, targets = (
        jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in task.splits.train
    )
    if cell["network"] == "vit":
        inputs = inputs.update(shape=(size, settings.pixels, settings.pixels, 3))
    make = lambda key, x: task.network.init(key, task.prepare(x))  # noqa: E731
    batch, params = (inputs, targets), jax.eval_shape(make, jax.random.key(0), inputs)
    lowered: Any = jax.jit(jax.grad(task.mean_loss)).lower(params, batch)
    number = sum(x.size for x in jax.tree.leaves(params))
    flops = lowered.cost_analysis()["flops"]
    steps = settings.num_warmup + settings.num_draws * settings.thin
    seconds = GRADIENTS_PER_STEP * flops / (TERAFLOPS * 1e12)
    memory = lowered.compile().memory_analysis().temp_size_in_bytes
    return {
        "num_parameters": number,
        "batch_size": size,
        "teraflop": flops / 1e12,
        "step_ms": 1e3 * seconds,
        "steps": steps,
        "num_chains": settings.num_members,
        "gib": (memory + 4 * ARRAYS * number) / 2**30,
        "draws_gib": 4 * number * settings.num_draws * settings.num_members / 2**30,
        "hours": settings.num_members * steps * seconds / 3600,
    }


def main():
    """Run the cells that are missing, print the table."""
    arguments = records.parser(__doc__, network=NETWORKS).parse_args()
    cells = records.cells_of(arguments)
    records.complete(arguments, cells, run_cell, "hours", "large-rows")


if __name__ == "__main__":
    main()
