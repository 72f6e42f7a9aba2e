"""Tables in plain text."""

from collections.abc import Iterable, Mapping

# Characters in a row that lists names.
LONGEST_ROW = 80


def aligned(columns: Mapping[str, list[str]]) -> list[str]:
    """Format the lines of a table with right-aligned columns."""
    with_heads = [(head, *cells) for head, cells in columns.items()]
    widths = [max(map(len, cells)) for cells in with_heads]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*with_heads, strict=True)
    ]


def described(title: str, rows: Mapping[str, str]) -> str:
    """Format a title and a line for each row, as the `repr` of an object."""
    width = max(map(len, rows), default=0)
    return "\n".join([title, *(f"  {head.ljust(width)}  {text}" for head, text in rows.items())])


def some(texts: Iterable[str]) -> str:
    """Join the texts that fit into a row, at least one, and count the rest."""
    texts, shown = list(texts), 1
    while shown < len(texts) and len(", ".join(texts[: shown + 1])) <= LONGEST_ROW:
        shown += 1
    more = [f"{len(texts) - shown} more"] * (shown < len(texts))
    return ", ".join([*texts[:shown], *more])


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, in the plural if needed."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def memory(number: int) -> str:
    """Format a number of bytes in the largest unit that is not larger than it."""
    units = ("bytes", "kB", "MB", "GB", "TB")
    power = min(max(len(str(number)) - 1, 0) // 3, len(units) - 1)
    return f"{number / 1000**power:.3g} {units[power]}"
