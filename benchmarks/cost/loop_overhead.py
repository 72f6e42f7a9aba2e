"""What `sample` and `recorded` add to a training loop: host time per step, chains, draws on disk.

Two loops at a time run in one process and in turn, a piece of some hundred steps each; a figure is
the median of the ratios of their pieces.

    python benchmarks/cost/loop_overhead.py --output out/loop_overhead.jsonl
"""

import itertools
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import records, samplers
from benchmarks.tabulated.costs import loops
from benchmarks.tabulated.table import markdown

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
    """Seconds of each piece of `sample`, which waits in a thread while others have their turn."""
    go, done = queue.Queue(), queue.Queue()

    def tick(step, stats):
        done.put(None)
        go.get()

    def run():
        go.get()
        optax_smile.sample(
            loss_fn,
            init(sizes, num_chains),
            batches,
            tx,
            key=jax.random.key(2),
            num_warmup=0,
            num_draws=1_000_000,
            thin=steps,
            progress=False,
            callback=tick,
            **arguments,
        )

    threading.Thread(target=run, daemon=True).start()
    while True:
        begun = time.perf_counter()
        go.put(None)
        done.get()
        yield time.perf_counter() - begun


def compare(what: str, ours: Pieces, against: str, theirs: Pieces, steps: int, pieces: int):
    """Run two loops in turn; the first two pieces compile."""
    seconds = np.array([[next(ours), next(theirs)] for _ in range(pieces + 2)])[2:]
    ratios = seconds[:, 0] / seconds[:, 1]
    return {
        "what": what,
        "against": against,
        "ratio": float(np.median(ratios)),
        "quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "microseconds_per_step": (np.median(seconds, axis=0) / steps * 1e6).tolist(),
    }


def host(pieces: int) -> Iterator[dict[str, Any]]:
    """A network that takes less time than starting its step."""
    batches, steps = make_batches(SMALL, 64, 50), 400
    adamw = optax.adamw(1e-3)
    for (name, tx), scan in itertools.product(SAMPLERS.items(), (False, True)):
        way = "in one scan" if scan else "step by step"
        for other, theirs in (("AdamW", adamw), (name, tx)):
            ours = sampled(tx, batches, steps, steps_per_dispatch=steps if scan else 1)
            hand = by_hand(theirs, batches, steps, scan)
            names = f"sample({name}), {way}", f"{other} by hand, {way}"
            yield compare(names[0], ours, names[1], hand, steps, pieces)


def chains(pieces: int) -> Iterator[dict[str, Any]]:
    """Ten chains on one device."""
    batches, steps = make_batches(SMALL, 64, 50), 400
    for name, tx in SAMPLERS.items():
        ten, one = (sampled(tx, batches, steps, num_chains=number) for number in (10, 1))
        yield compare(f"{name}, 10 chains", ten, "1 chain", one, steps, pieces)


def recorder(pieces: int) -> Iterator[dict[str, Any]]:
    """A recorded sampler between two draws."""
    batches, steps, tx = make_batches(SMALL, 64, 50), 400, SAMPLERS["psmile"]
    recorded = optax_smile.recorded(tx, num_warmup=10**9)
    for number, scan in itertools.product((None, 4), (False, True)):
        way = f"by hand, {number or 1} chain{'s' if number else ''}"
        way += ", in one scan" if scan else ", step by step"
        ours, theirs = (by_hand(x, batches, steps, scan, number) for x in (recorded, tx))
        names = f"recorded(psmile) {way}", f"psmile {way}"
        yield compare(names[0], ours, names[1], theirs, steps, pieces)
    batches, steps = make_batches(LARGE, 24, 10), 10
    ours, theirs = (by_hand(x, batches, steps, False, sizes=LARGE) for x in (recorded, tx))
    names = "recorded(psmile) by hand, 11 million weights", "psmile by hand, 11 million weights"
    yield compare(names[0], ours, names[1], theirs, steps, pieces)


def disk(pieces: int) -> Iterator[dict[str, Any]]:
    """Eleven million parameters written every 100 steps."""
    batches, steps = make_batches(LARGE, 24, 10), 100
    tx = samplers.build("smile_naive", 1e-2, num_data=1000)
    with tempfile.TemporaryDirectory() as folder:
        with_disk = sampled(tx, batches, steps, sizes=LARGE, directory=folder)
        without = sampled(tx, batches, steps, sizes=LARGE)
        # In memory every draw is kept: each piece adds 44 MB.
        record = compare("draws to disk", with_disk, "in memory", without, steps, pieces)
        written = sum(file.stat().st_size for file in Path(folder).glob("draw-*"))
        yield record | {"megabytes_written": written / 1e6}


PARTS: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "host": host,
    "chains": chains,
    "recorded": recorder,
    "disk": disk,
}


def main():
    """Run, print the table."""
    parser = records.parser(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--pieces", type=int, default=20)
    arguments = parser.parse_args()
    found = []
    for part in arguments.part or PARTS:
        for record in PARTS[part](arguments.pieces):
            record |= records.environment(arguments.allow_dirty)
            print(record["what"], record["against"], record["ratio"], flush=True)
            records.append(arguments.output, record)
            found.append(record)
    print(markdown(loops(found)))


if __name__ == "__main__":
    main()
