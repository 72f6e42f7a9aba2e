"""Quickstart over several seeds: the sampler against the deep ensemble it starts from.

Every seed has its own split, networks and chains. Prints the test scores, the mean predictive
entropy on digits and on digits with shuffled pixels (nats), and the paired differences with their
standard errors; appends one JSON line per seed.

    python benchmarks/prediction/quickstart_seeds.py --output out/quickstart_seeds.jsonl
"""

import dataclasses
import tempfile
import time
from pathlib import Path

from benchmarks import records
from benchmarks.tabulated.quickstart import scores
from benchmarks.tabulated.table import markdown

import quickstart


def main():
    """Run the seeds, print the table."""
    parser = records.parser(__doc__)
    parser.add_argument("--sampler", default="psmile")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()

    found = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        config = quickstart.Config(seed=seed, progress=False)
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            table = quickstart.run(config, arguments.sampler, Path(folder))
        record = {
            **records.environment(arguments.allow_dirty),
            "sampler": arguments.sampler,
            "config": dataclasses.asdict(config),
            "scores": {
                name: {score: float(value) for score, value in row.items()}
                for name, row in table.items()
            },
            "seconds": time.perf_counter() - begun,
        }
        print(record["scores"], flush=True)
        found.append(record)
        records.append(arguments.output, record)

    print(markdown(scores(found)))


if __name__ == "__main__":
    main()
