"""Cost of one `update` against AdamW: time, state and temporary memory.

Parameters in 20 float32 leaves, gradients given; the methods run interleaved in one process with
donated state, and every repetition gives one ratio to AdamW. Prints a table and appends one JSON
line per method.

    python benchmarks/update_cost.py --num-parameters 10_000_000 --output out/update_cost.jsonl
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import records

import optax_smile

NUM_LEAVES = 20
WARM_UP = 3


def methods() -> dict[str, optax.GradientTransformationExtraArgs]:
    """Build what is compared; AdamW comes first."""
    common: dict[str, Any] = {"num_data": 50_000}
    key = jax.random.key(0)
    transformations = {
        "adamw": optax.adamw(1e-3),
        "smile": optax_smile.smile(key=key, **common),
        "psmile": optax_smile.psmile(key=key, **common),
        "psmile centered=False": optax_smile.psmile(centered=False, key=key, **common),
        "psmile published": optax_smile.psmile(1e-2, **optax_smile.PUBLISHED, **common),
        "smile_naive": optax_smile.smile_naive(1e-2, **common),
        "psmile_naive": optax_smile.psmile_naive(1e-2, **common),
    }
    return {name: optax.with_extra_args_support(tx) for name, tx in transformations.items()}


def random_leaves(key: jax.Array, size: int, scale: float) -> list[jax.Array]:
    """Draw the leaves of a parameter tree."""
    keys = jax.random.split(key, NUM_LEAVES)
    return [scale * jax.random.normal(k, (size // NUM_LEAVES // 100, 100)) for k in keys]


def measure(size: int, repetitions: int) -> list[dict]:
    """Time all methods; one record each."""
    params = random_leaves(jax.random.key(1), size, 1.0)
    grads = random_leaves(jax.random.key(2), size, 1e-3)
    loss = jnp.float32(0.5)
    updates, states, seconds, temporary = {}, {}, {}, {}
    for name, tx in methods().items():
        states[name] = tx.init(params)
        lowered = jax.jit(
            lambda grads, state, params, tx=tx: tx.update(grads, state, params, value=loss),
            donate_argnums=1,
        ).lower(grads, states[name], params)
        updates[name] = lowered.compile()
        analysis = updates[name].memory_analysis()
        temporary[name] = analysis.temp_size_in_bytes if analysis else float("nan")
        seconds[name] = []
    parameter_bytes = sum(leaf.nbytes for leaf in params)
    state_bytes = {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.float32)
        for name, state in states.items()
    }
    for _ in range(WARM_UP + repetitions):
        for name in updates:
            start = time.perf_counter()
            result = updates[name](grads, states[name], params)
            states[name] = jax.block_until_ready(result)[1]
            seconds[name].append(time.perf_counter() - start)
            del result
    base = seconds["adamw"][WARM_UP:]
    return [
        {
            "method": name,
            "ratio_to_adamw": statistics.median(
                t / b for t, b in zip(times[WARM_UP:], base, strict=True)
            ),
            "milliseconds": 1e3 * statistics.median(times[WARM_UP:]),
            "state_in_parameters": state_bytes[name] / parameter_bytes,
            "temporary_in_parameters": temporary[name] / parameter_bytes,
        }
        for name, times in seconds.items()
    ]


def main():
    """Parse the arguments, measure, print, append."""
    parser = argparse.ArgumentParser(description="Cost of one update against AdamW.")
    parser.add_argument("--num-parameters", type=int, default=10_000_000)
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    setting = {
        **records.environment(),
        "optax": optax.__version__,
        "num_parameters": arguments.num_parameters,
        "repetitions": arguments.repetitions,
    }
    print(setting)
    print(f"{'method':24} {'time / AdamW':>12} {'state':>6} {'temporary':>10}")
    for record in measure(arguments.num_parameters, arguments.repetitions):
        print(
            f"{record['method']:24} {record['ratio_to_adamw']:12.2f}"
            f" {record['state_in_parameters']:6.2f} {record['temporary_in_parameters']:10.2f}"
        )
        records.append(arguments.output, setting | record)


if __name__ == "__main__":
    main()
