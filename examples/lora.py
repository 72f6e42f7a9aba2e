"""Low-rank weights (LoRA) of a small GPT, sampled in an unmodified Flax training loop.

Trains a GPT on the characters of one text with AdamW, freezes it in bfloat16, and adapts it to
another by low-rank weights in float32: with AdamW, the prior as a penalty and early stopping (MAP);
in the same loop with a sampler where AdamW was; in chains of all weights with `optax.partition`.
The prior is normal around the low-rank weights as they begin, where the network is the frozen one.
Data: modern and original Shakespeare in the folder `OPTAX_SMILE_DATA` if that is set, else Python's
documentation, its last fifth as the other text; foreign text: the source of `argparse`. 8 minutes.

    python examples/lora.py             # --sampler smile: another sampler, one changed word
"""

import argparse
import dataclasses
import itertools
import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import optax_smile

NUM_LETTERS = 96  # printable ASCII; what comes before it, such as the end of a line, is letter 0
FILES = "text/modern_shakespeare.txt", "text/tinyshakespeare.txt"
MATRICES = {"attend": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}  # in and out, in widths
LETTERS = optax_smile.Likelihood(  # "tokens", for large vocabularies, keeps no probabilities
    mean=jax.nn.softmax,
    log_density=lambda x, y: -optax.softmax_cross_entropy_with_integer_labels(x, y),
    entropy=lambda mean: jax.scipy.special.entr(mean).sum(axis=-1),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; prior precision and learning rate were chosen for the MAP on validation text."""

    width: int = 64
    context: int = 64
    rank: int = 8
    base_steps: int = 1_000
    num_train: int = 8_000
    num_test: int = 24_000
    batch_size: int = 31
    learning_rate: float = 5e-4
    map_steps: int = 240
    check_every: int = 4
    prior_precision: float = 300.0
    num_warmup: int = 600
    num_draws: int = 50
    thin: int = 20
    seed: int = 0


class GPT(nnx.Module):
    """Logits of the next letter, by two blocks of attention with four heads and a perceptron."""

    def __init__(self, width: int, context: int, **options):
        self.letters = nnx.Embed(NUM_LETTERS, width, **options)
        self.places = nnx.Embed(context, width, **options)
        options["use_bias"] = False
        self.norm = nnx.LayerNorm(width, use_scale=False, **options)
        self.blocks = nnx.List(nnx.Dict() for _ in range(2))
        for block, (name, (a, b)) in itertools.product(self.blocks, MATRICES.items()):
            block[name] = nnx.Linear(a * width, b * width, **options)
        self.head = nnx.Linear(width, NUM_LETTERS, **options)

    def __call__(self, letters):
        """Map `[input, letter]` to `[input, letter, class]`, float32."""
        x = self.letters(letters) + self.places(jnp.arange(letters.shape[1])[None])
        for block in self.blocks:
            heads = block["attend"](self.norm(x)).reshape(*x.shape[:2], 3, 4, -1)
            seen = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
            x += block["out"](seen.reshape(x.shape))
            x += block["down"](nnx.gelu(block["up"](self.norm(x))))
        return self.head(self.norm(x)).astype(jnp.float32)


def load(config: Config) -> dict[str, np.ndarray]:
    """Letters of all texts; the seed says which piece of the second one is trained on."""
    folder = os.environ.get("OPTAX_SMILE_DATA")
    try:
        texts = [Path(folder, name).read_text(encoding="utf-8") for name in FILES] if folder else []
    except FileNotFoundError as error:
        remedy = f"Set OPTAX_SMILE_DATA to a folder with {' and '.join(FILES)}, or unset it"
        raise SystemExit(f"{error}. {remedy} to take Python's documentation.") from None
    base, second = texts or ["".join(topics.values())] * 2
    # Shakespeare's texts are versions of the same plays: no scene of the second is in the first.
    base, second = base[: len(base) * 4 // 5], second[len(second) * 4 // 5 :]
    texts = base, second, Path(argparse.__file__).read_text(encoding="utf-8")[:8_000]
    codes = [np.frombuffer(text.encode("ascii", "replace"), np.uint8) for text in texts]
    base, second, foreign = (np.maximum(code, 31).astype(np.int32) - 31 for code in codes)
    rest, valid, test = np.split(second, [-config.num_train - config.num_test, -config.num_test])
    start = config.seed * config.num_train % (len(rest) - config.num_train)
    train = rest[start : start + config.num_train]
    return {"base": base, "train": train, "valid": valid, "test": test, "foreign": foreign}


def windows(letters: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut into inputs and what follows each of their letters."""
    end = (len(letters) - 1) // context * context
    return letters[:end].reshape(-1, context), letters[1 : end + 1].reshape(-1, context)


def batches_of(letters: np.ndarray, config: Config) -> Any:
    """Batches without end, of windows that are cut elsewhere and shuffled anew for every pass."""
    generator, size = np.random.default_rng(config.seed), config.batch_size
    while True:
        inputs, following = windows(letters[generator.integers(config.context) :], config.context)
        order = generator.permutation(len(inputs))
        for rows in order[: len(order) // size * size].reshape(-1, size):
            yield inputs[rows], following[rows]


def mean_loss(model: GPT, batch: Any) -> jax.Array:
    """Mean over letters of minus the log likelihood, nats."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1]).mean()


def train(model, tx, wrt, batches, num_steps, loss_fn=mean_loss):
    """Run Flax's usual loop, where nothing but `tx` tells an optimizer from a sampler."""
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, batch)
        optimizer.update(model, grads, value=loss)

    for step, batch in zip(range(1, num_steps + 1), batches, strict=False):
        train_step(model, optimizer, batch)
        yield step, optimizer


def low_rank(model: GPT) -> Any:
    """Give the low-rank weights, a tree of arrays."""
    return nnx.as_pure(nnx.state(model, nnx.LoRAParam))


def pretrain(config: Config, letters: np.ndarray) -> GPT:
    """Train on the first text, round to bfloat16, add low-rank weights in float32."""
    options: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": nnx.Rngs(config.seed)}
    model, steps = GPT(config.width, config.context, **options), config.base_steps
    rate = optax.warmup_cosine_decay_schedule(0, 4e-3, steps // 20, steps)
    tx = optax.adamw(rate, b2=0.95, weight_decay=0.05)
    list(train(model, tx, nnx.Param, batches_of(letters, config), steps))
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    for block, name in itertools.product(model.blocks, MATRICES):
        x = block[name]
        block[name] = nnx.LoRA(x.in_features, config.rank, x.out_features, base_module=x, **options)
    return model


def fit_map(model: GPT, config: Config, batches: Any, valid: Any) -> Any:
    """Train the low-rank weights with AdamW; give the best on `valid` of those on the way."""
    start, steps, found = low_rank(model), config.map_steps, []
    rate = optax.cosine_decay_schedule(config.learning_rate, steps)
    tx, valid_loss = optax.adamw(rate, weight_decay=0), nnx.jit(mean_loss)

    def penalized(model, batch):
        square = optax.tree.norm(optax.tree.sub(low_rank(model), start), squared=True)
        return mean_loss(model, batch) + config.prior_precision / 2 / config.num_train * square

    for step, _ in train(model, tx, nnx.LoRAParam, batches, steps, penalized):
        if step % config.check_every == 0:
            found.append((float(valid_loss(model, valid)), step, low_rank(model)))
    return min(found)[-1]


def sample_loop(model: GPT, config: Config, batches: Any, sampler: Any) -> list[Any]:
    """Sample in the loop that trained, with the sampler where AdamW was."""
    steps = config.num_warmup + config.num_draws * config.thin
    return [
        optax_smile.last_accepted(optimizer.opt_state, low_rank(model))
        for step, optimizer in train(model, sampler, nnx.LoRAParam, batches, steps)
        if step > config.num_warmup and (steps - step) % config.thin == 0
    ]


def sample_partition(model: GPT, config: Config, batches: Any, sampler: Any) -> Any:
    """Sample with plain Optax: two shorter chains of all weights, of which the frozen ones stay."""
    graph, params = nnx.split(model)
    chains = jax.tree.map(lambda x: jnp.stack([x, x]), nnx.as_pure(params))
    is_sampled = jax.tree_util.tree_map_with_path(lambda path, _: "lora" in str(path), chains)
    tx = optax.partition({True: sampler, False: optax.set_to_zero()}, is_sampled)

    def loss_fn(params, batch):
        return mean_loss(nnx.merge(graph, params), batch)

    steps: dict[str, Any] = {"num_warmup": config.num_warmup, "thin": config.thin}
    steps |= {"num_draws": config.num_draws // 2, "key": config.seed, "progress": False}
    return optax_smile.sample(loss_fn, chains, batches, tx, **steps)


def score(model: GPT, draws: Any, test: Any, foreign: Any) -> tuple[dict[str, float], np.ndarray]:
    """Scores of the average over draws, and its log density of each letter of the test text."""

    def logits_of(params, letters):
        copy = nnx.clone(model)
        nnx.update(copy, params)  # all weights, or the low-rank ones
        return copy(letters)

    predict, metrics, labels = optax_smile.predict, optax_smile.metrics, test[1].ravel()
    found = predict(logits_of, draws, test[0], likelihood="tokens", targets=test[1]).log_density
    full, unseen = (predict(logits_of, draws, x, likelihood=LETTERS) for x in (test[0], foreign))
    each = full.mean.reshape(-1, NUM_LETTERS)
    scores = {"LPPD": metrics.lppd(found), "perplexity": metrics.perplexity(found)}
    scores |= {"accuracy": metrics.accuracy(each, labels), "ECE": metrics.ece(each, labels)}
    return scores | {"entropy": full.total.mean(), "foreign": unseen.total.mean()}, found


def run(config: Config, sampler: str) -> dict[str, dict[str, float]]:
    """Train, sample, predict; give the scores of each method."""
    texts = load(config)
    valid, test, foreign = (windows(texts[x], config.context) for x in ("valid", "test", "foreign"))
    batches, model = batches_of(texts["train"], config), pretrain(config, texts["base"])
    begin, whole = low_rank(model), nnx.as_pure(nnx.state(model))
    best = fit_map(model, config, batches, valid)
    draws = {"MAP": [best]}
    for sample, prior_mean in ((sample_loop, begin), (sample_partition, whole)):
        nnx.update(model, best)
        prior = {"prior_mean": prior_mean, "prior_precision": config.prior_precision}
        tx = getattr(optax_smile, sampler)(num_data=config.num_train, **prior, key=config.seed)
        draws[f"{sampler}, {sample.__name__[7:]}"] = sample(model, config, batches, tx)
    return {name: score(model, found, test, foreign[0])[0] for name, found in draws.items()}


# Seconds, to see that all works.
SMOKE = {"width": 16, "base_steps": 2, "map_steps": 8, "num_test": 4_000}
SMOKE |= {"num_warmup": 4, "num_draws": 4, "thin": 2}


def main():
    """Parse the arguments, run, print the table."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--sampler", default="psmile", choices=["psmile", "smile"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="run seconds instead of minutes")
    arguments = parser.parse_args()
    config = Config(seed=arguments.seed, **(SMOKE if arguments.smoke else {}))
    table = run(config, arguments.sampler)
    print(f"{'held-out text':20}" + "".join(f"{score:>12}" for score in table["MAP"]))
    for name, row in table.items():
        print(f"{name:20}" + "".join(f"{value:12.4f}" for value in row.values()))


if __name__ == "__main__":
    main()
