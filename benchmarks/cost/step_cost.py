"""What a step costs: time, memory, traffic and compilation of AdamW, SGD, SGLD and our samplers.

    update   parameters in float32 leaves, gradients given: only the update
    network  whole steps, gradient of a batch included: a multilayer perceptron, LeNet, a small GPT

All methods of a cell run in one process in turn, on buffers that are donated as (params, state),
and each repetition gives one ratio to AdamW; medians are written. Small updates run many to a
program. Memory and traffic come from the compiled program, in arrays of the size of the parameters.

    python benchmarks/cost/step_cost.py --output benchmarks/results/step_cost.jsonl
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import records, samplers

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import rivals

import optax_smile

WARM_UP = 3
# Parameters that one program updates in total, in repeated steps.
PER_PROGRAM = 2_000_000
NUM_TOKENS = 65
SMALL_GPT = models.GPT(NUM_TOKENS, context=64, features=128, depth=2, num_heads=4)
# Network and shape of its batch.
NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp 705": (models.FullyConnected(), (256, 8)),
    "lenet": (models.LeNet(), (256, 28, 28, 1)),
    "gpt": (SMALL_GPT, (64, 64)),
    "mlp 10^7": (models.FullyConnected((3000, 2400, 200), 10), (128, 784)),
    "resnet-7": (models.ResNet7(), (64, 32, 32, 3)),
    "resnet-18": (models.ResNet18(), (32, 32, 32, 3)),
    "vit": (models.ViT(), (16, 160, 160, 3)),
    "nanogpt": (models.GPT(), (8, 256)),
}
USUAL = {"part": "update", "leaves": 20, "chains": 1, "grads": "float32"}


def blackjax_sgld() -> optax.GradientTransformationExtraArgs:
    """BlackJAX's SGLD step as an Optax transformation."""
    from blackjax.sgmcmc.diffusions import overdamped_langevin

    one_step = overdamped_langevin()

    def update(updates: Any, state: Any, params: Any = None, **extra: Any):
        del extra
        key, noise_key = jax.random.split(state)
        moved: Any = one_step(noise_key, params, jax.tree.map(lambda g: -5e4 * g, updates), 1e-7)
        return jax.tree.map(jnp.subtract, moved, params), key

    return optax.GradientTransformationExtraArgs(lambda params: jax.random.PRNGKey(0), update)


METHODS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "sgd": lambda: optax.sgd(1e-3),
    "blackjax sgld": blackjax_sgld,
    "sgld": lambda: optax_smile.sgld(1e-7, num_data=50_000, key=0),
    "smile_naive": lambda: samplers.build("smile_naive", 1e-2, num_data=50_000),
    "smile": lambda: optax_smile.smile(num_data=50_000, key=0),
    "psmile_naive": lambda: samplers.build("psmile_naive", 1e-2, num_data=50_000),
    "psmile": lambda: optax_smile.psmile(num_data=50_000, key=0),
}
SPECTRAL = {"norm": "spectral", "decoherence_length": None, "temperature": 0.1}
# Methods that move matrices as matrices, with AdamW and `psmile`, in cells of their own.
MATRICES = {
    "muon": lambda: rivals.muon(1e-3, 0.02),
    "spectral": lambda: optax_smile.smile(num_data=50_000, key=0, **SPECTRAL),
}


def update_cells() -> Iterator[dict[str, Any]]:
    """What is compared without a network."""
    usual = USUAL | {"parameters": 10**7}
    for parameters in (10**3, 10**4, 10**5, 10**6, 10**7, 10**8):
        yield usual | {"parameters": parameters}
    yield from (usual | {"leaves": leaves} for leaves in (1, 400))
    yield usual | {"parameters": 10**4, "leaves": 100}
    yield usual | {"grads": "bfloat16"}
    yield from (usual | {"parameters": 10**5, "chains": chains} for chains in (10, 32))


def network_cells() -> Iterator[dict[str, Any]]:
    """Whole steps."""
    for network in NETWORKS:
        for chains in (1, 10) if network == "mlp 705" else (1,):
            yield {"part": "network", "network": network, "chains": chains}
    # As in a Python loop, which pays for each array of the state.
    yield {"part": "network", "network": "mlp 705", "chains": 1, "per_program": 1}
    for network in ("lenet", "gpt", "resnet-7", "resnet-18"):
        yield {"part": "network", "network": network, "chains": 1, "of": "matrices"}


def network_problem(cell: records.Cell) -> tuple[Any, Callable, Any]:
    """Parameters, mean loss of them and a batch, and a batch."""
    name, key = cell["network"], jax.random.key(0)
    network, shape = NETWORKS[name]
    inputs: Any = jax.random.normal(key, shape)
    if isinstance(network, models.FullyConnected):
        targets = jax.random.normal(key, (shape[0], network.num_outputs))
    elif isinstance(network, models.GPT):
        inputs = jax.random.randint(key, shape, 0, NUM_TOKENS)
        targets = jnp.roll(inputs, -1, axis=1)
    else:
        targets = jax.random.randint(key, shape[:1], 0, 10)

    def loss(params, batch):
        outputs: Any = network.apply(params, batch[0])
        if isinstance(network, models.FullyConnected):
            return jnp.mean((outputs - batch[1]) ** 2) / 2
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, batch[1]))

    return network.init(key, inputs[:1]), loss, (inputs, targets)


def update_problem(cell: records.Cell) -> tuple[Any, Callable, Any]:
    """Random leaves; the loss is linear, and its gradient is what is given."""
    count, size = cell["leaves"], cell["parameters"] // cell["leaves"]
    shape = (size // 100, 100) if size % 100 == 0 and size > 100 else (size,)

    def leaves(seed, scale):
        keys = jax.random.split(jax.random.key(seed), count)
        return [scale * jax.random.normal(key, shape) for key in keys]

    grads = [leaf.astype(cell["grads"]) for leaf in leaves(2, 1e-3)]
    return leaves(1, 1.0), lambda params, batch: batch, grads


def step_of(cell: records.Cell, tx: Any, loss: Callable) -> Callable:
    """One step `(params, state, batch)` of one chain."""

    def step(params, state, batch):
        if cell["part"] == "update":
            value, grads = jnp.float32(0.5), batch
        else:
            value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return step


def measure(cell: records.Cell, methods: list[str], repetitions: int) -> dict[str, Any]:
    """Compile and time one cell; numbers for each of its methods, of which one is AdamW."""
    problem = update_problem if cell["part"] == "update" else network_problem
    params, loss, batch = problem(cell)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    chains = cell["chains"]
    num_steps = min(max(1, PER_PROGRAM // (size * chains)), 100) if size < 10**6 else 1
    # On the CPU convolutions are up to thirty times as slow inside a loop.
    if cell["part"] == "network" and cell["network"] != "mlp 705":
        num_steps = 1
    num_steps = cell.get("per_program", num_steps)
    found, programs, states = {}, {}, {}
    for name in methods:
        tx = optax.with_extra_args_support((METHODS | MATRICES)[name]())
        step = step_of(cell, tx, loss)

        def many(params, state, batch, step=step):
            def once(carry, _):
                return step(*carry, batch), None

            return jax.lax.scan(once, (params, state), length=num_steps)[0]

        function, state = (many if num_steps > 1 else step), tx.init(params)
        start: Any = (params, state)
        if chains > 1:
            function = jax.vmap(function, in_axes=(0, 0, None))
            start = jax.tree.map(lambda x: jnp.stack([x] * chains), start)
        start = jax.tree.map(jnp.copy, start)
        lowered = jax.jit(function, donate_argnums=(0, 1)).lower(*start, batch)
        begun = time.perf_counter()
        programs[name], states[name] = lowered.compile(), start
        compiled = time.perf_counter() - begun
        found[name] = {"compile_s": compiled} | memory_and_traffic(
            programs[name], size * chains, num_steps
        )
    seconds = interleaved(programs, states, batch, repetitions)
    for name, times in seconds.items():
        found[name]["ms"] = 1e3 * float(np.median(times)) / num_steps
        found[name]["ratio"] = float(np.median(times / seconds["adamw"]))
        found[name]["compile_ratio"] = found[name]["compile_s"] / found["adamw"]["compile_s"]
    return {
        "num_parameters": size,
        "steps_per_program": num_steps,
        "repetitions": repetitions,
        "methods": found,
        "ratio": {name: round(found[name]["ratio"], 3) for name in methods},
    }


def memory_and_traffic(program: Any, size: int, num_steps: int) -> dict[str, float]:
    """Memory and traffic of a compiled program, in float32 arrays of all parameters."""
    memory, array = program.memory_analysis(), 4 * size
    numbers = {"temporary": memory.temp_size_in_bytes / array}
    peak = getattr(memory, "peak_memory_in_bytes", 0)
    if peak:
        numbers["peak"] = peak / array
    # The traffic of a loop is that of its body, once.
    cost = program.cost_analysis()
    if num_steps == 1 and cost:
        numbers["traffic"] = cost["bytes accessed"] / array
    return numbers


def interleaved(
    programs: dict[str, Any], states: dict[str, Any], batch: Any, repetitions: int
) -> dict[str, np.ndarray]:
    """Run the programs in turn; seconds of each run.

    Each runs twice, and the second time counts: in the first one pays for the memory that another
    program has taken or given back.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(WARM_UP + repetitions):
        for name, program in programs.items():
            states[name] = jax.block_until_ready(program(*states[name], batch))
            start = time.perf_counter()
            states[name] = jax.block_until_ready(program(*states[name], batch))
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(times[WARM_UP:]) for name, times in seconds.items()}


def main():
    """Run the cells that are missing, print the tables."""
    parser = records.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=("update", "network"), default=None)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--largest", type=int, default=10**8, help="parameters of a cell")
    parser.add_argument("--methods", nargs="+", choices=METHODS | MATRICES, default=None)
    parser.add_argument("--repetitions", type=int, default=21)
    arguments = parser.parse_args()
    cells = [*update_cells(), *network_cells()]
    cells = [cell for cell in cells if cell["part"] in (arguments.parts or (cell["part"],))]
    cells = [cell for cell in cells if cell.get("parameters", 0) <= arguments.largest]
    cells = [cell for cell in cells if cell.get("network") in (None, *arguments.networks)]

    def run(cell):
        usual = ["psmile", *MATRICES] if "of" in cell else METHODS
        others = [name for name in arguments.methods or usual if name != "adamw"]
        return measure(cell, ["adamw", *others], arguments.repetitions)

    records.complete(arguments, cells, run, "ratio", "step-cost-all", "compilation")


if __name__ == "__main__":
    main()
