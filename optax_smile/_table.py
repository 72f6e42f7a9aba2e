"""Tables of plain text."""

from collections.abc import Mapping


def aligned(columns: Mapping[str, list[str]]) -> list[str]:
    """Lines of a table, cells on the right of their columns."""
    with_heads = [(head, *cells) for head, cells in columns.items()]
    widths = [max(map(len, cells)) for cells in with_heads]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*with_heads, strict=True)
    ]
