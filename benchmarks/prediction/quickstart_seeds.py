"""Quickstart over several seeds: the sampler against the deep ensemble it starts from.

Every seed has its own split, networks and chains. Records the test scores, also with a temperature
fitted on validation data, and the mean predictive entropy on digits and on digits with shuffled
pixels (nats).

    python benchmarks/prediction/quickstart_seeds.py --output out/quickstart_seeds.jsonl
"""

import dataclasses
import tempfile
from pathlib import Path

from benchmarks import records

import quickstart


def run_cell(cell: records.Cell) -> records.Record:
    """Run the quickstart with one seed."""
    config = quickstart.Config(seed=cell["seed"], progress=False)
    with tempfile.TemporaryDirectory() as folder:
        table = quickstart.run(config, cell["sampler"], Path(folder))[0]
    found = {name: {k: float(x) for k, x in row.items()} for name, row in table.items()}
    return {"sampler": cell["sampler"], "config": dataclasses.asdict(config), "scores": found}


if __name__ == "__main__":
    records.main(__doc__, run_cell, "scores", "quickstart", sampler=["psmile"], seed=range(10))
