"""The command `python -m optax_smile.report`."""

import argparse
from pathlib import Path

from optax_smile.report import write


def main(arguments: list[str] | None = None):
    """Write the report of the directory given on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m optax_smile.report",
        description="Write a report of a run of sample(): can its chains be trusted, and what do"
        " they predict?",
    )
    parser.add_argument("directory", type=Path, help="directory given to sample(directory=...)")
    parser.add_argument("--output", type=Path, help="HTML file (default: DIRECTORY/report.html)")
    parser.add_argument("--title", help="title of the page (default: sampler, chains and draws)")
    given = parser.parse_args(arguments)
    try:
        print(write(given.directory, given.output, title=given.title))
    except (ValueError, OSError, ImportError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
