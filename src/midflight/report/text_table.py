"""Plain text in columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_table(rows: Sequence[Sequence[object]], left: Collection[int] = (0,)) -> str:
    """Return lines of cells; each column is as wide as its widest cell.

    Columns in `left` are left-aligned, all others right-aligned.
    """
    table = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )
