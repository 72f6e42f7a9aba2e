"""One network trained on the average of `psmile` draws: what does it keep of it?

The problem of `examples/quickstart.py`: digits of 4 x 4 pixels, 1,097 to train, 200 to stop and
choose by, 500 to test, a network of 1,930 weights, 8 chains of 100 draws. The networks below are
like those of the chains and train alike: AdamW, batches of 64, until the loss on validation labels
no longer falls. What differs is the inputs and the targets:

    labels              training images and their labels
    average             training images, and what the average of the draws predicts for them
    average, mixtures   and 20,000 weighted averages of two training images

Eight networks of each; a score is their mean. The best draw and the best two are chosen by
`thin_to` on validation data. Scores are those of test data.

    python benchmarks/prediction/distil.py --output benchmarks/results/distil.jsonl
"""

import time
from typing import Any

from benchmarks import records
from benchmarks.tabulated.draws import distilled

import jax.numpy as jnp
import numpy as np
import optax
import quickstart
from data import Batches

import optax_smile

CONFIG = quickstart.Config(progress=False)
NETWORK: Any = quickstart.Network(CONFIG.width)
NUM_CLASSES, NUM_MIXTURES, BATCH_SIZE = 10, 20_000, 64
# An epoch is a pass over the training images, however many inputs there are.
STEPS_PER_EPOCH, NUM_EPOCHS, PATIENCE = 17, 1_200, 40


class Epochs(Batches):
    """Epochs of the same number of steps, however many inputs there are."""

    def __iter__(self):
        first, self.next_pass = self.next_pass * STEPS_PER_EPOCH, self.next_pass + 1
        return (self[first + place] for place in range(STEPS_PER_EPOCH))


def one_hot(labels: Any) -> np.ndarray:
    """Labels as probabilities."""
    return np.eye(NUM_CLASSES, dtype=np.float32)[labels]


def mean_loss(params: Any, batch: Any) -> Any:
    """Cross-entropy with probabilities as targets, nats."""
    inputs, targets = batch
    return jnp.mean(optax.softmax_cross_entropy(NETWORK.apply(params, inputs), targets))


def mixtures(images: Any, seed: int) -> np.ndarray:
    """Weighted averages of two images; the weights are uniform."""
    rng = np.random.default_rng(seed)
    first, second = images[rng.integers(len(images), size=(2, NUM_MIXTURES))]
    return second + rng.uniform(size=(NUM_MIXTURES, 1)).astype(np.float32) * (first - second)


def trained(examples: Any, validation: Any, seed: int) -> Any:
    """Networks `[network, ...]`."""
    return optax_smile.warmstart(
        mean_loss,
        lambda key: NETWORK.init(key, examples[0][:1]),
        Epochs(examples, BATCH_SIZE, seed),
        optax.adamw(CONFIG.learning_rate, weight_decay=CONFIG.weight_decay),
        num_members=CONFIG.num_members,
        num_epochs=NUM_EPOCHS,
        patience=PATIENCE,
        validation=(validation[0], one_hot(validation[1])),
        key=seed,
        progress=False,
    )


def predicted(draws: Any, inputs: Any) -> np.ndarray:
    """Probabilities of single draws, `[draw, input, class]`."""
    given: dict[str, Any] = {"likelihood": "categorical", "per": "draw", "batch_size": 2_000}
    found = optax_smile.predict(NETWORK.apply, draws, inputs, **given).each.mean
    return found.reshape(-1, len(inputs), NUM_CLASSES)


def score(probability: Any, targets: Any) -> dict[str, float]:
    """LPPD and accuracy of `[input, class]`; their mean over `[network, input, class]`."""
    of_target = probability[..., np.arange(len(targets)), targets].astype(float)
    accuracy = np.mean(probability.argmax(-1) == targets)
    return {"lppd": float(np.mean(np.log(of_target))), "accuracy": float(accuracy)}


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Train on labels, sample, train on the average, and score all on test data."""
    seed = cell["seed"]
    train, validation, (inputs, targets) = quickstart.load(seed)
    images, labels = train[0], one_hot(train[1])
    members = {"labels": trained((images, labels), validation, seed)}
    draws: Any = optax_smile.sample(
        mean_loss,
        members["labels"],
        quickstart.Batches(images, labels, CONFIG.sampling_batch_size, seed),
        quickstart.make_sampler("psmile", CONFIG, num_data=len(images)),
        num_warmup=CONFIG.num_warmup,
        num_draws=CONFIG.num_draws,
        thin=CONFIG.thin,
        key=seed,
        progress=False,
    )
    given: dict[str, Any] = {"likelihood": "categorical", "targets": validation[1]}
    held_out = optax_smile.predict(NETWORK.apply, draws, validation[0], per="draw", **given)
    few = predicted(draws.thin_to(2, held_out), inputs)
    began = time.monotonic()
    more = np.concatenate([images, mixtures(images, seed)])
    soft = predicted(draws, more).mean(axis=0)
    seconds_average, began = time.monotonic() - began, time.monotonic()
    members["average, mixtures"] = trained((more, soft), validation, seed)
    seconds_training = time.monotonic() - began
    members["average"] = trained((images, soft[: len(images)]), validation, seed)
    found = {
        name: predicted(optax_smile.Snapshots.from_members(each), inputs)
        for name, each in members.items()
    }
    found["ensemble"] = found["labels"].reshape(-1, 2, *found["labels"].shape[1:]).mean(axis=1)
    found["deep ensemble"] = found["labels"].mean(axis=0)
    found |= {"all": predicted(draws, inputs).mean(axis=0), "two": few.mean(axis=0)}
    found["single"] = few[0]
    return {
        "scores": {name: score(probability, targets) for name, probability in found.items()},
        "num_draws": len(draws),
        "num_members": CONFIG.num_members,
        "num_inputs": len(more),
        "seconds_average": seconds_average,
        "seconds_training": seconds_training,
    }


if __name__ == "__main__":
    records.main(__doc__, run_cell, "scores", distilled, seed=range(3))
