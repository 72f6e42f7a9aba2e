"""Cost of one `update` against AdamW, and of a whole step of several chains.

Without `--num-chains`: parameters in 20 float32 leaves, gradients given; time, state and temporary
memory. With it: chains of a network 8-16-16-16-1 under `vmap`, the gradient of a batch of 256
included, 100 steps in one program. The methods run interleaved in one process, and every repetition
gives one ratio to AdamW and to `psmile_naive`. Prints a table and appends one JSON line per method.

    python benchmarks/update_cost.py --num-parameters 10_000_000 --output out/update_cost.jsonl
    python benchmarks/update_cost.py --num-chains 10 --output out/update_cost.jsonl
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import records

import optax_smile

NUM_LEAVES = 20
WIDTHS, BATCH_SIZE, NUM_STEPS = (8, 16, 16, 16, 1), 256, 100
WARM_UP = 3


def methods() -> dict[str, optax.GradientTransformationExtraArgs]:
    """Build what is compared."""
    common: dict[str, Any] = {"num_data": 50_000}
    key = jax.random.key(0)
    transformations = {
        "adamw": optax.adamw(1e-3),
        "smile": optax_smile.smile(key=key, **common),
        "psmile": optax_smile.psmile(key=key, **common),
        "psmile published": optax_smile.published.psmile(1e-2, **common),
        "smile_naive": optax_smile.smile_naive(1e-2, **common),
        "psmile_naive": optax_smile.psmile_naive(1e-2, **common),
    }
    return {name: optax.with_extra_args_support(tx) for name, tx in transformations.items()}


def time_interleaved(
    advances: dict[str, Callable[[Any], Any]], states: dict[str, Any], repetitions: int
) -> list[dict[str, Any]]:
    """Time functions from state to state; one record each."""
    seconds: dict[str, list[float]] = {name: [] for name in advances}
    for _ in range(WARM_UP + repetitions):
        for name, advance in advances.items():
            start = time.perf_counter()
            states[name] = jax.block_until_ready(advance(states[name]))
            seconds[name].append(time.perf_counter() - start)

    def ratio(name: str, base: str) -> float:
        pairs = zip(seconds[name][WARM_UP:], seconds[base][WARM_UP:], strict=True)
        return statistics.median(t / b for t, b in pairs)

    return [
        {
            "method": name,
            "ratio_to_adamw": ratio(name, "adamw"),
            "ratio_to_psmile_naive": ratio(name, "psmile_naive"),
            "milliseconds": 1e3 * statistics.median(times[WARM_UP:]),
        }
        for name, times in seconds.items()
    ]


def random_leaves(key: jax.Array, size: int, scale: float) -> list[jax.Array]:
    """Draw the leaves of a parameter tree."""
    keys = jax.random.split(key, NUM_LEAVES)
    return [scale * jax.random.normal(k, (size // NUM_LEAVES // 100, 100)) for k in keys]


def measure_updates(size: int, repetitions: int) -> list[dict[str, Any]]:
    """Time and memory of one update of each method."""
    params = random_leaves(jax.random.key(1), size, 1.0)
    grads = random_leaves(jax.random.key(2), size, 1e-3)
    loss = jnp.float32(0.5)
    parameter_bytes = sum(leaf.nbytes for leaf in params)
    advances, states, memory = {}, {}, {}
    for name, tx in methods().items():
        states[name] = tx.init(params)
        lowered = jax.jit(
            lambda grads, state, params, tx=tx: tx.update(grads, state, params, value=loss),
            donate_argnums=1,
        ).lower(grads, states[name], params)
        update = lowered.compile()
        advances[name] = lambda state, update=update: update(grads, state, params)[1]
        analysis = update.memory_analysis()
        temporary = analysis.temp_size_in_bytes if analysis else float("nan")
        leaves = [leaf for leaf in jax.tree.leaves(states[name]) if leaf.dtype == jnp.float32]
        memory[name] = {
            "state_in_parameters": sum(leaf.nbytes for leaf in leaves) / parameter_bytes,
            "temporary_in_parameters": temporary / parameter_bytes,
        }
    timed = time_interleaved(advances, states, repetitions)
    return [record | memory[record["method"]] for record in timed]


def squared_error(params, batch):
    """Mean squared error of a small network."""
    x, targets = batch
    *hidden, (kernel, bias) = params
    for weights, shift in hidden:
        x = jax.nn.relu(x @ weights + shift)
    return jnp.mean((x @ kernel + bias - targets) ** 2) / 2


def measure_chains(num_chains: int, repetitions: int) -> list[dict[str, Any]]:
    """Time of `NUM_STEPS` whole steps of each method."""
    shape = (NUM_STEPS, BATCH_SIZE)
    batches = (jax.random.normal(jax.random.key(1), (*shape, WIDTHS[0])), jnp.ones((*shape, 1)))
    keys = jax.random.split(jax.random.key(2), num_chains)
    sizes = list(zip(WIDTHS[:-1], WIDTHS[1:], strict=True))
    params = [
        (0.3 * jax.random.normal(key, (num_chains, *size)), jnp.zeros((num_chains, size[1])))
        for key, size in zip(jax.random.split(jax.random.key(3), len(sizes)), sizes, strict=True)
    ]
    advances, states = {}, {}
    for name, tx in methods().items():

        def step(chain, batch, tx=tx):
            params, state = chain
            loss, grads = jax.value_and_grad(squared_error)(params, batch)
            updates, state = tx.update(grads, state, params, value=loss)
            return (optax.apply_updates(params, updates), state), None

        advances[name] = jax.jit(jax.vmap(lambda chain, step=step: _scan(step, chain, batches)))
        state = jax.vmap(tx.init)(params)
        if getattr(state, "key", None) is not None:
            state = optax.tree.set(state, key=jax.random.key_data(keys))
        states[name] = (params, state)
    return time_interleaved(advances, states, repetitions)


def _scan(step, chain, batches):
    return jax.lax.scan(step, chain, batches)[0]


def main():
    """Parse the arguments, measure, print, append."""
    parser = argparse.ArgumentParser(description="Cost of updates and steps.")
    parser.add_argument("--num-parameters", type=int, default=10_000_000)
    parser.add_argument("--num-chains", type=int, help="time whole steps of so many chains")
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    setting = {
        **records.environment(),
        "optax": optax.__version__,
        "repetitions": arguments.repetitions,
    }
    if arguments.num_chains:
        setting["num_chains"] = arguments.num_chains
        measured = measure_chains(arguments.num_chains, arguments.repetitions)
    else:
        setting["num_parameters"] = arguments.num_parameters
        measured = measure_updates(arguments.num_parameters, arguments.repetitions)
    print(setting)
    columns = [column for column in measured[0] if column != "method"]
    print(f"{'method':24}", *columns)
    for record in measured:
        cells = (f"{record[column]:{len(column)}.2f}" for column in columns)
        print(f"{record['method']:24}", *cells)
        records.append(arguments.output, setting | record)


if __name__ == "__main__":
    main()
