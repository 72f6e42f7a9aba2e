"""Outputs of code that the pages show, for readers on GitHub. Sphinx runs the code instead.

python docs/outputs.py                  rewrite every `text output` block
python docs/outputs.py start faq        those of some pages
python docs/outputs.py --check          fail if one differs by more than numbers
"""

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
import textwrap
from pathlib import Path

FOLDER = Path(__file__).parent
# A block of code, with the output below it if that is shown.
BLOCK = re.compile(
    r"^```python[^\n]*\n(?P<code>.*?)^```\n(?:\n```text output\n(?P<shown>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"[-+]?\d[\d.,e-]*")
# A code block of the documentation holds so many characters without scrolling.
LINE_WIDTH = 88


def run(page: Path) -> str:
    """The page with the outputs of its code, run from top to bottom."""
    names: dict[str, object] = {"__name__": "__main__"}

    def replace(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], page.name, "exec"), names)
        if block["shown"] is None:
            return block[0]
        first, last = (place - block.start() for place in block.span("shown"))
        return f"{block[0][:first]}{wrapped(printed.getvalue())}{block[0][last:]}"

    return BLOCK.sub(replace, page.read_text(encoding="utf-8"))


def wrapped(text: str) -> str:
    """Long lines as several."""
    lines = [
        textwrap.wrap(line, LINE_WIDTH, subsequent_indent="    ")
        if len(line) > LINE_WIDTH
        else [line]
        for line in text.splitlines()
    ]
    return "".join(f"{line}\n" for parts in lines for line in parts)


def main() -> int:
    """Rewrite the pages, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", help="names of pages, all by default")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    os.environ.setdefault("MPLBACKEND", "Agg")
    stale = []
    for page in sorted(FOLDER.rglob("[!_]*.md")):
        text = page.read_text(encoding="utf-8")
        named = not arguments.pages or page.stem in arguments.pages
        if not named or "```text output\n" not in text:
            continue
        with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
            made = run(page)
        if not arguments.check:
            page.write_text(made, encoding="utf-8")
        elif NUMBER.sub("", made) != NUMBER.sub("", text):
            stale.append(
                f"{page.name}: an output differs; run `python docs/outputs.py {page.stem}`."
            )
    print(*stale, sep="\n", end="\n" if stale else "")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
