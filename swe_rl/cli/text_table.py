"""Plain tables: left-aligned text, right-aligned numbers, two blanks between columns."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Lines of equal columns; the first row is the heading. Columns of cells that begin with a digit lean right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numeric = [all(row[i][:1].isdigit() for row in rows[1:]) and len(rows) > 1 for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right and i else cell.ljust(width)
            for i, (cell, width, right) in enumerate(zip(row, widths, numeric, strict=True))
        ).rstrip()
        for row in rows
    )
