"""The final table as plain text: one line per phase, split and sampling mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def results_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Phases down, (split, mode) across, in the order of measuring; cells are "success ± standard error (n)" in %."""
    columns = list(dict.fromkeys((row["split"], row["mode"]) for row in rows))
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    found = {(row["phase"], row["split"], row["mode"]): row for row in rows}
    table = [["phase", *(f"{split} {mode}" for split, mode in columns)]]
    for phase in phases:
        table.append([phase, *(_cell(found.get((phase, *column))) for column in columns)])
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{100 * row['success']:.1f} ± {100 * row['stderr']:.1f} ({row['num_samples']})"
