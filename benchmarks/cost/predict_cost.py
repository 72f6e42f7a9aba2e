"""Cost of the Bayesian model average against bare forward passes: time and memory.

A LeNet of 61,706 parameters on images of 28 x 28 pixels. Compiled forward passes of three snapshots
and a `Predictor` with targets, three updates and the result, take turns in one process; every
repetition gives one ratio. Memory: how far the peak of the process, one per batch size, grows from
the first repetition to the last. A cell is a batch size.

    python benchmarks/cost/predict_cost.py --output out/predict_cost.jsonl
"""

import multiprocessing
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks import records
from benchmarks.tabulated.costs import predictions

import jax
import jax.numpy as jnp
import numpy as np
from models import LeNet

import optax_smile

WARM_UP, SNAPSHOTS = 2, 3


def peak_mib() -> float:
    """Largest memory of the process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_cell(cell: records.Cell) -> dict[str, float]:
    """Measure in a separate process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        return cell | alone.submit(measure, **cell).result()


def measure(num_inputs: int, batch_size: int, repetitions: int) -> dict[str, float]:
    """Time both; the ratio is the median over the repetitions."""
    generator = np.random.default_rng(0)
    images = jnp.asarray(generator.normal(size=(num_inputs, 28, 28, 1)), jnp.float32)
    labels = generator.integers(0, 10, num_inputs)
    network = LeNet()
    start = jax.device_get(network.init(jax.random.key(0), images[:1]))

    def logits_of(params: Any, images) -> Any:
        return network.apply(params, images)

    forward = jax.jit(logits_of)
    batches = [images[at : at + batch_size] for at in range(0, num_inputs, batch_size)]
    predictor = optax_smile.Predictor(
        logits_of, images, likelihood="categorical", targets=labels, batch_size=batch_size
    )
    bare, averaged, after_first = [], [], 0.0
    for repetition in range(WARM_UP + repetitions):
        scales = 1 + 0.01 * np.arange(SNAPSHOTS, dtype=np.float32) + 0.1 * repetition
        snapshots = [jax.tree.map(lambda x, by=by: np.float32(x * by), start) for by in scales]
        begun = time.perf_counter()
        for params in snapshots:
            for batch in batches:
                jax.block_until_ready(forward(params, batch))
        between = time.perf_counter()
        for params in snapshots:
            predictor.update(params)
        predictor.finalize()
        ended = time.perf_counter()
        bare.append(between - begun)
        averaged.append(ended - between)
        if repetition == 0:
            after_first = peak_mib()
    pairs = list(zip(averaged, bare, strict=True))[WARM_UP:]
    ratios = [new / old for new, old in pairs]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "lower_quartile": quartiles[0],
        "upper_quartile": quartiles[2],
        "bare_seconds": statistics.median(bare[WARM_UP:]) / SNAPSHOTS,
        "added_mib": peak_mib() - after_first,
    }


if __name__ == "__main__":
    axes = {"num_inputs": [10_000], "batch_size": [500, 2_000, 10_000], "repetitions": [15]}
    records.main(__doc__, run_cell, "ratio", predictions, **axes)
