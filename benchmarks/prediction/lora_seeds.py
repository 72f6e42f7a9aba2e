"""Low-rank weights of a small GPT: the average of draws against the MAP, over seeds.

Every seed has its own GPT (examples/lora.py), piece of the second text, low-rank weights and
chain. A cell is one seed, method and prior precision; both methods get the precision that is best
on validation text, and the MAP is stopped early there. A chain starts from the MAP of its prior.

    OPTAX_SMILE_DATA=... python benchmarks/prediction/lora_seeds.py --output out/lora.jsonl
"""

import dataclasses
import functools
import os
import time
from typing import Any

from benchmarks import records, samplers
from benchmarks.tabulated.ensembles import lora as scores

import jax
import lora
import numpy as np
from flax import nnx

import optax_smile

# The prior is around the low-rank weights as they begin, unless a method says otherwise.
METHODS = ("MAP", "psmile", "psmile, cold", "psmile, around the MAP")


@functools.cache
def pretrained(config: lora.Config) -> tuple[dict[str, np.ndarray], lora.GPT, Any]:
    """Texts, the frozen GPT and its low-rank weights as they begin."""
    texts = lora.load(config)
    model = lora.pretrain(config, texts["base"])
    return texts, model, lora.low_rank(model)


@functools.cache
def mode(base: lora.Config, config: lora.Config) -> Any:
    """The MAP."""
    texts, model, start = pretrained(base)
    nnx.update(model, start)
    valid = lora.windows(texts["valid"], config.context)
    return lora.fit_map(model, config, lora.batches_of(texts["train"], config), valid)


def run_cell(cell: records.Cell, **short: Any) -> records.Record:
    """Sample, and score on validation and test text."""
    base = lora.Config(seed=cell["seed"], **short)
    config = dataclasses.replace(base, prior_precision=cell["precision"])
    (texts, model, start), begun = pretrained(base), time.monotonic()
    best = mode(base, config)
    batches = lora.batches_of(texts["train"], config)
    nnx.update(model, best)
    sampler, _, variant = cell["method"].partition(", ")
    centre = best if variant == "around the MAP" else start
    draws: Any = [best]
    if sampler != "MAP":
        given: dict[str, Any] = {"prior_mean": centre, "prior_precision": config.prior_precision}
        if variant == "cold":
            given["temperature"] = optax_smile.cold_temperature(config.num_train, start)
            given["tuner"] = optax_smile.angle_tuner(0.3)
        tx = samplers.build(sampler, num_data=config.num_train, **given, key=config.seed)
        draws = lora.sample_loop(model, config, batches, tx)
    cut = {name: lora.windows(texts[name], config.context) for name in ("valid", "test", "foreign")}
    table, density = lora.score(model, draws, cut["test"], cut["foreign"][0])
    valid, _ = lora.score(model, draws, cut["valid"], cut["foreign"][0][:1])
    return {
        "scores": {name: float(value) for name, value in table.items()},
        "valid": valid["LPPD"],
        "windows": np.round(density.mean(axis=1), 5).tolist(),
        "num_parameters": sum(x.size for x in jax.tree.leaves(start)),
        "settings": dataclasses.asdict(config),
        "seconds": time.monotonic() - begun,
    }


def main():
    """Run the cells that are missing, print the table."""
    parser = records.parser(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["MAP", "psmile"])
    parser.add_argument("--precisions", nargs="+", type=float, default=[100.0, 300.0, 1000.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--smoke", action="store_true", help="tiny runs, as a check")
    arguments = parser.parse_args()
    if not os.environ.get("OPTAX_SMILE_DATA"):
        parser.error("set OPTAX_SMILE_DATA, a folder with the texts of examples/lora.py")
    axes = {"seed": arguments.seeds, "precision": arguments.precisions, "method": arguments.methods}
    run = functools.partial(run_cell, **(lora.SMOKE if arguments.smoke else {}))
    records.show(scores(records.complete(arguments, records.product(**axes), run, "valid")))


if __name__ == "__main__":
    main()
