"""Chains on a mesh of devices: virtual ones of a CPU, or the GPUs of one machine.

Trains a deep ensemble, starts a pSMILE chain from each of its members and compares the two on test
data. Chains are spread over the axis "chain" of the mesh and need no communication; with `--data 2`
two devices share a chain and the examples of its batches. Several machines: `multi_host.py`.

Data: the 1,797 digits that scikit-learn brings along, averaged to 4 x 4 pixels.

    JAX_NUM_CPU_DEVICES=8 python examples/multi_device.py          # on GPUs without the variable
    JAX_NUM_CPU_DEVICES=8 python examples/multi_device.py --data 2 --directory run

With a directory (`pip install 'optax-smile[storage]'`) draws and checkpoints are written: after
Ctrl-C or a kill the same command goes on. Half a minute on two cores. The first command prints

    mesh: {'chain': 8, 'data': 1} of 8 devices, cpu
    chains: 8, the last kernel (8, 32, 10) as P('chain',)
    deep ensemble: LPPD -0.2229
    psmile: LPPD -0.1790
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


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings: those of the quickstart, with as many chains as fill the mesh."""

    width: int = 32
    min_chains: int = 8
    learning_rate: float = 3e-3
    num_epochs: int = 100
    batch_size: int = 216
    num_warmup: int = 2_000
    num_draws: int = 100
    thin: int = 60


def load(batch_size: int):
    """Split the digits into batches and test data."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(-1, 16)
    images = (images / 8 - 0.6).astype(np.float32)
    images, test, labels, test_labels = train_test_split(
        images, labels, test_size=500, random_state=0, stratify=labels
    )
    rows = [slice(i, i + batch_size) for i in range(0, len(images) - batch_size + 1, batch_size)]
    return [(images[row], labels[row]) for row in rows], (test, test_labels)


def run(config: Config, mesh: jax.sharding.Mesh, directory: Path | None):
    """Train and sample on the mesh, predict.

    Returns:
        The members of the deep ensemble, and the LPPD on test data by method.
    """
    (*batches, valid), (images, labels) = load(config.batch_size)
    num_chains = -(-config.min_chains // mesh.shape["chain"]) * mesh.shape["chain"]
    key, width = jax.random.key(0), config.width
    network = nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(width), nn.relu, nn.Dense(10)])
    logits_of: Any = network.apply

    def mean_loss(params, batch):
        images, labels = batch
        logits = logits_of(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    members = optax_smile.warmstart(
        mean_loss,
        lambda key: network.init(key, images[:1]),
        batches,
        optax.adamw(config.learning_rate, weight_decay=1e-3),
        num_members=num_chains,
        num_epochs=config.num_epochs,
        validation=valid,
        mesh=mesh,
        directory=directory and directory / "warmstart",
        key=key,
    )
    sampler = optax_smile.psmile(num_data=len(batches) * config.batch_size, key=key)
    draws = optax_smile.sample(
        mean_loss,
        members,
        batches,
        sampler,
        num_warmup=config.num_warmup,
        num_draws=config.num_draws,
        thin=config.thin,
        steps_per_dispatch=config.thin,
        mesh=mesh,
        directory=directory and directory / "draws",
        key=key,
    )

    def lppd(snapshots):
        prediction = optax_smile.predict(
            logits_of, snapshots, images, likelihood="categorical", targets=labels
        )
        return metrics.lppd(prediction.log_density)

    ensemble = optax_smile.Snapshots.from_members(members)
    return members, {"deep ensemble": lppd(ensemble), "psmile": lppd(draws)}


def all_devices(per_chain: int) -> jax.sharding.Mesh:
    """Spread chains, and the examples of their batches, over all devices."""
    count, kind = jax.device_count(), jax.devices()[0].platform
    if count == 1:
        raise SystemExit(
            f"JAX sees a single device ({kind}). Set JAX_NUM_CPU_DEVICES=8 for eight virtual ones"
            " of the CPU (JAX_PLATFORMS=cpu, too, beside a GPU):\n\n"
            "    JAX_NUM_CPU_DEVICES=8 python examples/multi_device.py"
        )
    if per_chain < 1 or count % per_chain:
        raise SystemExit(f"--data must divide the number of devices, {count}, got {per_chain}.")
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((count // per_chain, per_chain), ("chain", "data"), axis_types=kinds)


def main():
    """Parse the arguments, make the mesh, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=int, default=1, help="devices that share a chain")
    parser.add_argument("--directory", type=Path, help="write there, and go on from there")
    parser.add_argument("--smoke", action="store_true", help="run seconds instead of a minute")
    arguments = parser.parse_args()
    config = Config()
    if arguments.smoke:
        config = dataclasses.replace(config, num_epochs=2, num_warmup=20, num_draws=5, thin=2)
    mesh = all_devices(arguments.data)
    members, table = run(config, mesh, arguments.directory)
    print(f"mesh: {dict(mesh.shape)} of {jax.device_count()} devices, {jax.devices()[0].platform}")
    kernel = jax.tree.leaves(members)[-1]
    print(f"chains: {len(kernel)}, the last kernel {kernel.shape} as {kernel.sharding.spec}")
    for name, score in table.items():
        print(f"{name}: LPPD {score:.4f}")


if __name__ == "__main__":
    main()
