"""A GPT on the characters of modern Shakespeare: an ensemble, a chain from each, and new text.

Trains with AdamW, samples, and compares perplexities. Then it writes text from the average over all
draws, and colours it: the darker a letter, the less the draws agree on what comes there.

    python examples/nanogpt.py --smoke             # seconds
    python examples/nanogpt.py                     # small: half an hour
    python examples/nanogpt.py --preset paper      # 10.8 million parameters, for a GPU
"""

import html
from pathlib import Path
from typing import Any

import data
import experiment
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from experiment import Experiment, Settings

PRESETS = {
    "smoke": Settings(
        num_members=2,
        num_letters=20,
        num_epochs=1,
        num_warmup=4,
        num_draws=2,
        thin=1,
        sampling_batch_size=16,
        num_train=256,
        num_test=32,
        width=0.125,
        depth=1,
        context=32,
    ),
    "laptop": Settings(
        num_members=2,
        num_epochs=8,
        batch_size=32,
        num_warmup=400,
        num_draws=16,
        thin=50,
        sampling_batch_size=32,
        width=1 / 6,
        depth=2,
        context=64,
    ),
    "paper": Settings(
        num_epochs=30,
        patience=30,
        num_warmup=200,
        num_draws=10,
        thin=100,
        sampling_batch_size=128,
        test_batch_size=64,
        dtype="bfloat16",
    ),
}
PROMPT, NUM_VOICES = "What is the matter, my lord?\n\n", 8


def optimizer(num_steps: int) -> optax.GradientTransformation:
    """AdamW as in the paper, for small networks with larger steps at first."""
    rate = optax.warmup_cosine_decay_schedule(0, 3e-3, max(1, num_steps // 20), num_steps, 1e-4)
    return optax.adamw(rate, b2=0.95, weight_decay=0.05)


def papers_optimizer(num_steps: int) -> optax.GradientTransformation:
    """AdamW, from 3e-4 down to 2.5e-4."""
    rate = optax.linear_schedule(3e-4, 2.5e-4, num_steps)
    return optax.adamw(rate, b2=0.95, weight_decay=0.05)


def build(settings: Settings) -> Experiment:
    """Load modern Shakespeare: 90 % of the text to train, 5 % to stop early by, 5 % to test."""
    splits = data.shakespeare("modern_shakespeare", settings.context)
    network = models.GPT(
        num_tokens=len(splits.classes),
        context=settings.context,
        width=settings.width,
        depth=settings.depth or 6,
        dtype=settings.dtype,
    )
    train = optimizer if settings.width < 1 else papers_optimizer
    return Experiment(network, experiment.shortened(splits, settings), "tokens", train)


def spread(num_chains: int, num_draws: int) -> list[int]:
    """Places of `NUM_VOICES` draws, as many of each chain, where draws alternate between chains."""
    places = np.arange(num_chains * num_draws).reshape(num_draws, num_chains).T.ravel()
    chosen = np.linspace(0, len(places) - 1, min(len(places), NUM_VOICES))
    return [int(places[round(i)]) for i in chosen]


def write_text(task: Experiment, settings: Settings, draws: Any, page: Path):
    """Write letters from the average of some draws, coloured by their disagreement."""
    letters, kept = list(task.splits.classes), list(draws)
    voices = jax.tree.map(
        lambda *x: jnp.stack(x), *(kept[i] for i in spread(draws.num_chains, draws.num_draws))
    )

    @jax.jit
    def next_letter(voices, tokens, place, key):
        logits = jax.vmap(lambda params: task.outputs_of(params, tokens[None])[0, place])(voices)
        each = jax.nn.softmax(logits)
        mean = each.mean(axis=0)
        entropy, doubt = (jax.scipy.special.entr(p).sum(axis=-1) for p in (mean, each))
        return jax.random.categorical(key, jnp.log(mean)), entropy - doubt.mean()

    written = [letters.index(letter) for letter in PROMPT]
    disagreement = [0.0] * len(written)
    for number in range(settings.num_letters):
        seen = written[-settings.context :]
        tokens = np.zeros(settings.context, np.int32)
        tokens[: len(seen)] = seen
        key = jax.random.fold_in(jax.random.key(settings.seed), number)
        letter, information = next_letter(voices, tokens, len(seen) - 1, key)
        written.append(int(letter))
        disagreement.append(float(information))
    shade = np.array(disagreement) / max(1e-9, np.quantile(disagreement, 0.98))
    text = "".join(
        f'<span title="{nats:.3f} nats" style="background:rgba(214,96,77,{min(1.0, part):.2f})">'
        f"{html.escape(letters[letter])}</span>"
        for letter, nats, part in zip(written, disagreement, shade, strict=True)
    )
    path = page.with_name(f"{page.stem}-text.html")
    path.write_text(HEAD + text + "</pre></body></html>\n", encoding="utf-8")
    print(f"text: {path}")


HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Text of a Bayesian GPT</title>
<style>body{max-width:46rem;margin:2rem auto;font-family:sans-serif}
pre{white-space:pre-wrap;line-height:1.6;font-size:1rem}</style></head>
<body><h1>Text of a Bayesian GPT</h1><p>Written letter by letter from the average prediction of the
draws. The redder a letter, the less they agreed on what comes there (mutual information, in nats;
shown when pointed at).</p><pre>"""


if __name__ == "__main__":
    experiment.main("nanogpt", __doc__, PRESETS, build, after=write_text)
