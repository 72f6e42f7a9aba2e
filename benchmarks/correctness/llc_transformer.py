r"""The local learning coefficient of a small transformer: do seeds agree, and a tenfold run?

Two layers, 64 wide, context 32: 108,992 parameters that predict the next character of Shakespeare,
trained by AdamW on the 100,000 characters that n counts. Batches of 5 pieces of 32 characters.
A cell is a localization, a seed, and how many steps and draws; `--times 10` makes ten times as many
steps of warm-up and between draws, with as many draws.

    python benchmarks/correctness/llc_transformer.py --weights out/transformer.msgpack \
        --output benchmarks/results/llc_transformer.jsonl
"""

import functools
import os
import time
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.correctness import known_coefficients
from benchmarks.correctness.llc import estimate

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization

from optax_smile.local import llc

CONTEXT, WIDTH, HEADS, NUM_DATA, PIECES_OF_BATCH = 32, 64, 4, 100_000, 5
TRAINING_STEPS, TRAINING_PIECES = 4_000, 32
NUM_CHAINS, NUM_WARMUP, NUM_DRAWS, THIN = 2, 300, 5, 40


@functools.cache
def text() -> tuple[int, tuple[np.ndarray, np.ndarray]]:
    """Size of the alphabet; inputs and targets `[piece, character]`."""
    path = Path(os.environ["OPTAX_SMILE_DATA"]) / "text" / "tinyshakespeare.txt"
    characters, tokens = np.unique(list(path.read_text(encoding="utf-8")), return_inverse=True)
    tokens = tokens[: NUM_DATA + 1].astype(np.int32)
    return len(characters), (tokens[:-1].reshape(-1, CONTEXT), tokens[1:].reshape(-1, CONTEXT))


def fresh(key: jax.Array) -> dict[str, Any]:
    """Draw weights."""
    keys = iter(jax.random.split(key, 40))
    alphabet = text()[0]

    def normal(*shape: int, spread: float):
        return jax.random.normal(next(keys), shape) * spread

    narrow, wide = WIDTH**-0.5, (4 * WIDTH) ** -0.5
    params = {
        "tokens": normal(alphabet, WIDTH, spread=1 / 8),
        "places": normal(CONTEXT, WIDTH, spread=0.1),
        "out": normal(WIDTH, alphabet, spread=narrow),
        "scale": jnp.ones(WIDTH),
    }
    layers = [
        {
            "queries_keys_values": normal(WIDTH, 3 * WIDTH, spread=narrow),
            "heads": normal(WIDTH, WIDTH, spread=narrow / 2),
            "up": normal(WIDTH, 4 * WIDTH, spread=narrow),
            "down": normal(4 * WIDTH, WIDTH, spread=wide / 2),
            "scale": jnp.ones(WIDTH),
            "scale_up": jnp.ones(WIDTH),
        }
        for _ in range(2)
    ]
    return params | {"layers": layers}


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def loss_fn(params: Any, batch: tuple[Any, Any]) -> jax.Array:
    """Mean cross-entropy of the next character."""
    inputs, targets = batch
    x = params["tokens"][inputs] + params["places"]
    mask = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))
    for layer in params["layers"]:
        split = jnp.split(_normed(x, layer["scale"]) @ layer["queries_keys_values"], 3, -1)
        q, k, v = (part.reshape(*x.shape[:2], HEADS, WIDTH // HEADS) for part in split)
        seen = jnp.einsum("bihd,bjhd->bhij", q, k) / (WIDTH // HEADS) ** 0.5
        seen = jax.nn.softmax(jnp.where(mask, seen, -1e9), -1)
        x = x + jnp.einsum("bhij,bjhd->bihd", seen, v).reshape(x.shape) @ layer["heads"]
        x = x + jax.nn.gelu(_normed(x, layer["scale_up"]) @ layer["up"]) @ layer["down"]
    logs = jax.nn.log_softmax(_normed(x, params["scale"]) @ params["out"])
    return -jnp.take_along_axis(logs, targets[..., None], -1).mean()


def batches() -> list[tuple[np.ndarray, ...]]:
    """All pieces, in an order of their own."""
    order = np.random.default_rng(0).permutation(NUM_DATA // CONTEXT)
    return [tuple(part[rows] for part in text()[1]) for rows in order.reshape(-1, PIECES_OF_BATCH)]


def trained(path: Path | None, num_steps: int) -> Any:
    """Weights after AdamW, read from a file if it is there."""
    params: Any = fresh(jax.random.key(0))
    if path is not None and path.exists():
        return jax.tree.map(jnp.asarray, serialization.from_bytes(params, path.read_bytes()))
    rate = optax.warmup_cosine_decay_schedule(0, 3e-3, min(100, num_steps // 2), num_steps, 1e-5)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.1))
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    rng, parts = np.random.default_rng(0), text()[1]
    for _ in range(num_steps):
        rows = rng.integers(0, len(parts[0]), TRAINING_PIECES)
        params, state = step(params, state, tuple(part[rows] for part in parts))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(serialization.to_bytes(params))
    return params


def run(cell: dict[str, Any], weights: Path | None, training_steps: int) -> dict[str, Any]:
    """One estimate."""
    params = trained(weights, training_steps)
    begun = time.perf_counter()
    steps = {name: cell[name] for name in ("num_chains", "num_warmup", "num_draws", "thin")}
    found = llc(
        loss_fn,
        params,
        batches(),
        num_data=NUM_DATA,
        localization=cell["localization"],
        key=cell["seed"],
        progress=False,
        **steps,
    )
    told = {
        "num_parameters": known_coefficients.size(params),
        "num_data": NUM_DATA,
        "start_loss": found.start_loss,
        "loss": float(found.loss.mean()),
        "distance": float(np.sqrt(found.square.mean())),
        "trace": [float(level) for level in found.trace.mean(axis=0)],
    }
    return told | estimate(found, begun, cell["num_warmup"], cell["thin"])


if __name__ == "__main__":
    parser = records.parser(__doc__)
    parser.add_argument("--weights", type=Path, help="file that keeps the trained weights")
    parser.add_argument("--training-steps", type=int, default=TRAINING_STEPS)
    parser.add_argument("--localizations", nargs="+", type=float, default=[10_000.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=NUM_WARMUP)
    arguments = parser.parse_args()
    cells = [
        {
            "localization": localization,
            "seed": seed,
            "num_chains": NUM_CHAINS,
            "num_warmup": arguments.warmup * arguments.times,
            "num_draws": NUM_DRAWS,
            "thin": THIN * arguments.times,
        }
        for localization in arguments.localizations
        for seed in arguments.seeds
    ]
    given = {"weights": arguments.weights, "training_steps": arguments.training_steps}
    records.complete(arguments, cells, functools.partial(run, **given), told="llc")
