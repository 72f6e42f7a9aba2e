"""The loop that the scripts of large networks share: train, sample, predict, report."""

import argparse
import dataclasses
import functools
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import Batches, Splits

import optax_smile
from optax_smile import metrics, plots, report

SAMPLERS = ("psmile", "smile")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of one run; width, depth, training examples and pixels make it small.

    Without `step_size` the sampler finds it.
    """

    num_members: int = 4
    num_epochs: int = 100
    patience: int = 20
    batch_size: int = 64
    num_warmup: int = 4_000
    num_draws: int = 50
    thin: int = 160
    sampling_batch_size: int = 128
    num_train: int | None = None
    num_test: int | None = None
    width: float = 1.0
    depth: int | None = None
    context: int = 256
    pixels: int = 160
    dtype: str = "float32"
    step_size: float | None = None
    muon_rate: float | None = None  # Train with Muon in place of the script's optimizer.
    test_batch_size: int = 500
    num_letters: int = 400
    steps_per_dispatch: int = 1
    seed: int = 0


class Experiment(NamedTuple):
    """A network and its data.

    Attributes:
        network: of Flax, whose `init` and `apply` take inputs as `prepare` makes them.
        splits: inputs and targets.
        likelihood: see `optax_smile.predict`.
        optimizer: of the warm start, as a function of the number of its steps.
        prepare: what the device does with inputs before the network sees them.
        augment: see `Batches`.
        unseen: name and inputs of other data, to be unsure about.
    """

    network: nn.Module
    splits: Splits
    likelihood: str
    optimizer: Callable[[int], optax.GradientTransformation]
    prepare: Callable[[Any], Any] = lambda inputs: inputs
    augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None
    unseen: tuple[str, np.ndarray] | None = None

    @property
    def num_data(self) -> int:
        """Number of targets: of images, or of characters."""
        return self.splits.train[1].size

    def init(self, key: jax.Array) -> Any:
        """Parameters of a fresh network."""
        return self.network.init(key, self.prepare(self.splits.train[0][:1]))

    def outputs_of(self, params: Any, inputs: Any) -> Any:
        """Logits."""
        return self.network.apply(params, self.prepare(inputs))

    def mean_loss(self, params: Any, batch: Any) -> jax.Array:
        """Cross-entropy, mean over the targets, nats."""
        inputs, targets = batch
        logits = self.outputs_of(params, inputs)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    def batches(self, size: int, seed: int) -> Batches:
        """Batches to train on."""
        return Batches(self.splits.train, size, seed, self.augment)


def shortened(splits: Splits, settings: Settings) -> Splits:
    """Keep the first examples of each part."""
    train, valid, test = (
        tuple(x[:count] for x in part)
        for part, count in zip(
            splits[:3], (settings.num_train, settings.num_test, settings.num_test), strict=True
        )
    )
    return splits._replace(train=train, valid=valid, test=test)


def warm_start(
    experiment: Experiment, settings: Settings, seed: int, num_members: int, **options: Any
) -> Any:
    """Train members side by side; the weights with the best validation loss. Ctrl-C raises."""
    batches = experiment.batches(settings.batch_size, seed)
    with warnings.catch_warnings():
        # Half-trained weights would be taken for trained ones.
        warnings.filterwarnings("error", message="`warmstart` was stopped")
        return optax_smile.warmstart(
            experiment.mean_loss,
            experiment.init,
            batches,
            experiment.optimizer(settings.num_epochs * len(batches)),
            num_members=num_members,
            num_epochs=settings.num_epochs,
            patience=settings.patience,
            validation=experiment.splits.valid,
            key=jax.random.key(seed),
            **options,
        )


def draw(
    experiment: Experiment,
    settings: Settings,
    members: Any,
    sampler: optax.GradientTransformation,
    seed: int,
    **options: Any,
) -> Any:
    """Run a chain from every member."""
    return optax_smile.sample(
        experiment.mean_loss,
        members,
        experiment.batches(settings.sampling_batch_size, seed),
        sampler,
        num_warmup=settings.num_warmup,
        num_draws=settings.num_draws,
        thin=settings.thin,
        steps_per_dispatch=settings.steps_per_dispatch,
        key=jax.random.key(seed),
        **options,
    )


def run(
    experiment: Experiment, settings: Settings, sampler: str, directory: Path
) -> tuple[dict[str, dict[str, float]], Any, Any]:
    """Train, sample, predict; what is found is kept in the directory and read when run again.

    Returns:
        Scores on test data by method, the draws, and a plot of the calibration of classes.
    """
    mesh = over_devices(settings.num_members)
    members = warm_start(
        experiment,
        settings,
        settings.seed,
        settings.num_members,
        mesh=mesh,
        directory=directory / "warmstart",
    )
    seed, where = settings.seed, directory / "draws"
    build, num_data = getattr(optax_smile, sampler), experiment.num_data
    made = build(settings.step_size, num_data=num_data, key=seed)
    draws = draw(experiment, settings, members, made, seed + 1, mesh=mesh, directory=where)

    inputs, targets = experiment.splits.test
    ensemble = optax_smile.Snapshots.from_members(members)
    read = {"likelihood": experiment.likelihood, "batch_size": settings.test_batch_size}
    table, axes = {}, None
    for name, snapshots in {"deep ensemble": ensemble, sampler: draws}.items():
        prediction = optax_smile.predict(
            experiment.outputs_of, snapshots, inputs, targets=targets, per="chain", **read
        )
        table[name] = metrics.score(prediction, targets)
        if experiment.unseen:
            other, images = experiment.unseen
            unseen = optax_smile.predict(experiment.outputs_of, snapshots, images, **read)
            table[name] |= {"entropy": prediction.total.mean(), other: unseen.total.mean()}
        if prediction.uncertainty == "entropy":
            axes = plots.reliability(prediction.mean, targets, label=name, ax=axes)
    return table, draws, axes


def over_devices(num_chains: int) -> jax.sharding.Mesh | None:
    """All devices, if the chains divide among them."""
    count = jax.device_count()
    if count == 1 or num_chains % count:
        return None
    return jax.make_mesh((count,), ("chain",), axis_types=(jax.sharding.AxisType.Auto,))


def main(
    name: str,
    description: str | None,
    presets: Mapping[str, Settings],
    build: Callable[..., Experiment],
    networks: Sequence[str] = (),
    after: Callable[[Experiment, Settings, Any, Path], None] | None = None,
):
    """Parse the arguments, run, print the table, write the report, and what comes `after`.

    Where there are several `networks`, `build` gets the chosen one as `network`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sampler", default="psmile", choices=SAMPLERS)
    parser.add_argument("--step-size", type=float, help="instead of the one that the sampler finds")
    if networks:
        parser.add_argument("--network", default=networks[0], choices=networks)
    parser.add_argument("--preset", default="laptop", choices=presets)
    parser.add_argument("--smoke", action="store_true", help="the same as --preset smoke")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="keeps a run that goes on when run again")
    parser.add_argument("--output", type=Path, default=Path(f"{name}.html"))
    arguments = parser.parse_args()
    if arguments.seed < 0:
        parser.error(f"--seed must be >= 0, got {arguments.seed}")
    if arguments.output.suffix != ".html":
        parser.error(f"--output must end in .html, got {arguments.output}")
    preset = "smoke" if arguments.smoke else arguments.preset
    given = {"seed": arguments.seed, "step_size": arguments.step_size}
    settings = dataclasses.replace(presets[preset], **given)
    try:
        chosen = functools.partial(build, network=arguments.network) if networks else build
        experiment = chosen(settings)
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from None

    with tempfile.TemporaryDirectory() as folder:
        directory = arguments.directory or Path(folder) / name
        table, draws, axes = run(experiment, settings, arguments.sampler, directory)
        print(f"{'test set':15}" + "".join(f"{score:>10}" for score in table["deep ensemble"]))
        for method, row in table.items():
            print(f"{method:15}" + "".join(f"{value:10.4f}" for value in row.values()))
        title = f"{name}: {arguments.sampler} beside a deep ensemble"
        pictures = {"Dots below the dotted line are overconfident.": axes} if axes else {}
        output = report.write(directory / "draws", arguments.output, title=title, pictures=pictures)
        print(f"report: {output}")
        if after:
            after(experiment, settings, draws, output)
