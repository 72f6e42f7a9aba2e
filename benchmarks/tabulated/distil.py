"""One network instead of many draws: its scores, and what it loses."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, mean_error

# Field of the records: name of the row, and forward passes of a prediction.
ROWS = {
    "all": ("average of all draws", "{num_draws}"),
    "two": ("average of the best two draws", "2"),
    "single": ("the best draw", "1"),
    "average, mixtures": ("network trained on the average, with mixtures", "1"),
    "average": ("network trained on the average", "1"),
    "labels": ("network trained on labels", "1"),
    "ensemble": ("ensemble of two such networks", "2"),
    "deep ensemble": ("ensemble of all such networks", "{num_members}"),
}


def scores(found: Sequence[Record]) -> Table:
    """LPPD and accuracy on test data, mean over seeds, and the LPPD behind that of all draws."""
    rows = []
    for field, (name, passes) in ROWS.items():
        of = [record["scores"][field] for record in found]
        behind = [
            ours["lppd"] - record["scores"]["all"]["lppd"]
            for ours, record in zip(of, found, strict=True)
        ]
        if of:
            rows.append(
                [
                    name,
                    passes.format_map(found[0]),
                    mean_error([one["lppd"] for one in of], 4),
                    "" if field == "all" else mean_error(behind, 4, "+"),
                    mean_error([one["accuracy"] for one in of], 4),
                ]
            )
    header = ["", "forward passes", "test LPPD", "- that of all draws, paired", "accuracy"]
    return Table(header, rows, found)
