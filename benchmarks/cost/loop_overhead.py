"""What `sample` and `recorded` add to a training loop: time per step, chains, and `recorded`.

Two loops at a time run in one process and in turn, a piece of some hundred steps each; a figure is
the median of the ratios of their pieces.

    python benchmarks/cost/loop_overhead.py --output out/loop_overhead.jsonl
"""

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import records
from benchmarks.tabulated.costs import loops

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_smile

SMALL = (8, 20, 20, 5)  # 705 parameters
LARGE = (784, 2800, 2800, 350, 10)  # 11 million
SAMPLERS: dict[str, optax.GradientTransformationExtraArgs] = {
    "smile": optax_smile.smile(num_data=1000, key=jax.random.key(0)),
    "psmile": optax_smile.psmile(num_data=1000, key=jax.random.key(0)),
    "sgld": optax_smile.sgld(1e-3, num_data=1000, key=jax.random.key(0)),
}


def init(sizes: tuple[int, ...], num_chains: int) -> Any:
    """Weights of a dense network for every chain."""
    keys = jax.random.split(jax.random.key(1), len(sizes))
    return [
        (jax.random.normal(k, (num_chains, m, n)) / np.sqrt(m), jnp.zeros((num_chains, n)))
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=False)
    ]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Mean squared error."""
    hidden, targets = batch
    for weight, bias in params[:-1]:
        hidden = jnp.tanh(hidden @ weight + bias)
    weight, bias = params[-1]
    return jnp.mean((hidden @ weight + bias - targets) ** 2)


def make_batches(sizes: tuple[int, ...], size: int, number: int) -> list[Any]:
    """NumPy batches of noise."""
    generator = np.random.default_rng(0)
    shapes = ((size, sizes[0]), (size, sizes[-1]))
    return [
        tuple(generator.normal(size=s).astype(np.float32) for s in shapes) for _ in range(number)
    ]


Pieces = Iterator[float]


def by_hand(
    tx: Any,
    batches: list[Any],
    steps: int,
    scan: bool,
    num_chains: int | None = None,
    sizes: tuple[int, ...] = SMALL,
) -> Pieces:
    """Seconds of each piece of the loop that everybody writes; with chains under `vmap`."""
    tx = optax.with_extra_args_support(tx)
    params, begin = init(sizes, num_chains or 1), tx.init
    if num_chains is None:
        params = jax.tree.map(lambda x: x[0], params)
    else:
        begin = jax.vmap(begin)

    def step(carry, batch):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params, value=loss)
        return (optax.apply_updates(params, updates), state), loss

    if num_chains is not None:
        step = jax.vmap(step, in_axes=(0, None))
    one = jax.jit(step, donate_argnums=0)
    many = jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches), donate_argnums=0)
    stream, carry = itertools.cycle(batches), (params, begin(params))
    while True:
        begun = time.perf_counter()
        if scan:
            taken = list(itertools.islice(stream, steps))
            carry, _ = many(carry, jax.tree.map(lambda *x: np.stack(x), *taken))
        else:
            for batch in itertools.islice(stream, steps):
                carry, _ = one(carry, batch)
        jax.block_until_ready(carry)
        yield time.perf_counter() - begun


def sampled(
    tx: Any, batches: list[Any], steps: int, *, sizes=SMALL, num_chains: int = 1, **arguments: Any
) -> Pieces:
    """Seconds of each piece of a `Run`, which waits in a thread while others have their turn."""
    go, done = queue.Queue(), queue.Queue()

    def run():
        go.get()
        key = jax.random.key(2)
        params = init(sizes, num_chains)
        chains = optax_smile.Run(loss_fn, params, batches, tx, key=key, **arguments)
        for _ in chains.draws(1_000_000, thin=steps):
            done.put(None)
            go.get()

    threading.Thread(target=run, daemon=True).start()
    while True:
        begun = time.perf_counter()
        go.put(None)
        done.get()
        yield time.perf_counter() - begun


class Comparison(NamedTuple):
    """Two loops, and how many steps are a piece of each; a loop begins when it is first asked."""

    ours: Pieces
    theirs: Pieces
    steps: int


def comparisons() -> Iterator[tuple[str, str, str, Comparison]]:
    """Give part, both names and the loops of each row."""
    batches, steps = make_batches(SMALL, 64, 50), 400
    # A network that takes less time than starting its step.
    for (name, tx), scan in itertools.product(SAMPLERS.items(), (False, True)):
        way = "in one scan" if scan else "step by step"
        for other, theirs in (("AdamW", optax.adamw(1e-3)), (name, tx)):
            ours = sampled(tx, batches, steps, steps_per_dispatch=steps if scan else 1)
            loops = Comparison(ours, by_hand(theirs, batches, steps, scan), steps)
            yield "host", f"sample({name}), {way}", f"{other} by hand, {way}", loops
    for name, tx in SAMPLERS.items():
        ten, one = (sampled(tx, batches, steps, num_chains=number) for number in (10, 1))
        yield "chains", f"{name}, 10 chains", "1 chain", Comparison(ten, one, steps)
    # A recorded sampler between two draws.
    tx = SAMPLERS["psmile"]
    recorded = optax_smile.recorded(tx, num_warmup=10**9)
    for number, scan in itertools.product((None, 4), (False, True)):
        way = f"by hand, {number or 1} chain{'s' if number else ''}"
        way += ", in one scan" if scan else ", step by step"
        ours, plain = (by_hand(x, batches, steps, scan, number) for x in (recorded, tx))
        yield "recorded", f"recorded(psmile) {way}", f"psmile {way}", Comparison(ours, plain, steps)
    batches, steps = make_batches(LARGE, 24, 10), 10
    ours, plain = (by_hand(x, batches, steps, False, sizes=LARGE) for x in (recorded, tx))
    way = "by hand, 11 million weights"
    yield "recorded", f"recorded(psmile) {way}", f"psmile {way}", Comparison(ours, plain, steps)


def compare(loops: Comparison, pieces: int) -> dict[str, Any]:
    """Run two loops in turn; the first two pieces compile."""
    seconds = np.array([[next(loops.ours), next(loops.theirs)] for _ in range(pieces + 2)])[2:]
    ratios = seconds[:, 0] / seconds[:, 1]
    return {
        "ratio": float(np.median(ratios)),
        "quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "microseconds_per_step": (np.median(seconds, axis=0) / loops.steps * 1e6).tolist(),
    }


def main():
    """Run the comparisons that are missing, print the table."""
    parser = records.parser(__doc__)
    parser.add_argument("--part", choices=("host", "chains", "recorded"), action="append")
    parser.add_argument("--pieces", type=int, default=20)
    arguments = parser.parse_args()
    chosen = {
        (what, against): loops
        for part, what, against, loops in comparisons()
        if part in (arguments.part or [part])
    }

    def run(cell: records.Cell) -> records.Record:
        return cell | compare(chosen[cell["what"], cell["against"]], arguments.pieces)

    cells = [{"what": what, "against": against} for what, against in chosen]
    records.show(loops(records.complete(arguments, cells, run, "ratio")))


if __name__ == "__main__":
    main()
