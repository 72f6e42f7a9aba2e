"""One posterior from any number of processes: chains spread over all their devices.

Each process runs this script; together they form one mesh of devices. Chains need no communication;
with `--data 2` two devices share the examples of a batch. Draws and checkpoints go to one directory
that all processes see. If a process dies, the others end within a minute: start all of them again
with the same arguments, and the run goes on where it was, with the same draws as without the death.
SIGTERM to any process ends all of them in order, after a checkpoint.

Data: the 1,797 digits that scikit-learn brings along. Half a minute on two cores.

By hand, here two processes of two devices on one machine; one command in each of two terminals:

    export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2
    python examples/multi_host.py run --coordinator 127.0.0.1:12321 --num-processes 2 --process-id 0
    python examples/multi_host.py run --coordinator 127.0.0.1:12321 --num-processes 2 --process-id 1

On several machines give the address of the first one, under which the others reach it. A single
process needs none of the three options but `--num-processes 1`.

Under SLURM, where JAX finds all of this out itself (on GPUs one process for each):

    srun --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 python examples/multi_host.py /shared/run

`sbatch --signal=TERM@120` makes SLURM ask for the end two minutes before it kills; `--requeue`
makes it start again. On Kubernetes an indexed Job (`completionMode: Indexed`, `completions` =
`parallelism` = number of processes, a headless service as `subdomain`) runs the same command
without options, after `pip install 'jax[k8s]'`, with a shared volume for the directory; its service
account must be allowed to read pods. `restartPolicy: OnFailure` starts it again.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_smile
from optax_smile import metrics

# After so many seconds without a sign of life a process counts as dead, and the others end.
HEARTBEAT_TIMEOUT = 20


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; the axis `chain` of the mesh must divide the number of chains."""

    width: int = 32
    num_chains: int = 8
    learning_rate: float = 3e-3
    num_epochs: int = 100
    batch_size: int = 256
    num_warmup: int = 1_000
    num_draws: int = 100
    thin: int = 20
    checkpoint_minutes: float = 1.0


def run(config: Config, directory: Path, devices_per_batch: int) -> dict[str, float] | None:
    """Train and sample on all devices; the first process predicts and returns the scores."""
    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        (images / 8 - 1).astype(np.float32), labels.astype(np.int32), test_size=500, random_state=0
    )
    # The same batches in every process.
    num_batches = len(train_labels) // config.batch_size
    order = np.random.default_rng(0).permutation(len(train_labels))
    rows = order[: num_batches * config.batch_size].reshape(num_batches, -1)
    batches = [(train_images[r], train_labels[r]) for r in rows]

    layers = [nn.Dense(config.width), nn.relu, nn.Dense(config.width), nn.relu, nn.Dense(10)]
    network, key = nn.Sequential(layers), jax.random.key(0)

    def logits_of(params, images) -> Any:
        return network.apply(params, images)

    def mean_loss(params, batch):
        images, labels = batch
        logits = logits_of(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    shape = jax.device_count() // devices_per_batch, devices_per_batch
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(shape, ("chain", "data"), axis_types=auto)
    shared: dict[str, Any] = {"mesh": mesh, "checkpoint_minutes": config.checkpoint_minutes}
    members = optax_smile.warmstart(
        mean_loss,
        lambda key: network.init(key, train_images[:1]),
        batches,
        optax.adam(config.learning_rate),
        num_members=config.num_chains,
        num_epochs=config.num_epochs,
        directory=directory / "warmstart",
        key=key,
        **shared,
    )
    draws = optax_smile.sample(
        mean_loss,
        members,
        batches,
        optax_smile.psmile(num_data=len(train_labels), key=key),
        num_warmup=config.num_warmup,
        num_draws=config.num_draws,
        thin=config.thin,
        directory=directory / "draws",
        key=key,
        **shared,
    )
    if jax.process_index():
        return None
    prediction = optax_smile.predict(
        logits_of, draws, test_images, likelihood="categorical", targets=test_labels
    )
    accuracy = metrics.accuracy(prediction.mean, test_labels)
    return {"LPPD": metrics.lppd(prediction.log_density), "accuracy": accuracy}


def main():
    """Join the other processes, run, print the scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="seen by all processes")
    parser.add_argument("--data", type=int, default=1, help="devices that share a batch")
    parser.add_argument("--coordinator", help="address of the first process, such as host:12321")
    parser.add_argument("--num-processes", type=int, help="default: as the cluster says")
    parser.add_argument("--process-id", type=int, help="from 0; default: as the cluster says")
    parser.add_argument("--num-draws", type=int, default=Config.num_draws)
    parser.add_argument("--smoke", action="store_true", help="run seconds instead of minutes")
    arguments = parser.parse_args()
    config = Config(num_draws=arguments.num_draws)
    if arguments.smoke:
        small = {"width": 8, "num_epochs": 2, "num_warmup": 5, "thin": 2}
        config = dataclasses.replace(config, checkpoint_minutes=0.0, **small)
    if arguments.num_processes != 1:
        place = arguments.coordinator, arguments.num_processes, arguments.process_id
        jax.distributed.initialize(*place, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT)
    print(f"process {jax.process_index()} of {jax.process_count()}: {jax.devices()}", flush=True)
    scores = run(config, arguments.directory, arguments.data)
    if scores is not None:
        print(", ".join(f"{name} {score:.4g}" for name, score in scores.items()))


if __name__ == "__main__":
    main()
