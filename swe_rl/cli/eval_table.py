"""The final table of an evaluation as plain text, from the rows of results.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from swe_rl.cli.text_table import text_table
from swe_rl.evaluation.attempt import OUTCOMES

SHOWN_PARTS = 12  # repositories and the like in the table; results.json has all


def final_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Success, pass@k, parts, costs and outcomes of every split and mode; rates in %, intervals of 95 %."""
    blocks = [_success(rows), _pass_at(rows), _costs(rows), _outcomes(rows)]
    blocks += [_parts(rows, key) for key in ("kind", "difficulty", "repository")]
    return "\n\n".join(block for block in blocks if block)


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what no two runs have in common: seconds."""
    return {**row, "cost": {key: value for key, value in row["cost"].items() if key != "seconds"}}


def percent(value: float) -> str:
    """`41.2`, or `-` for what is not known."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f}"


def between(low: float, high: float) -> str:
    return "-" if math.isnan(low) or math.isnan(high) else f"[{percent(low)}, {percent(high)}]"


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['split']} {row['mode']}"


def _success(rows: Sequence[Mapping[str, Any]]) -> str:
    heading = ["", "pass@1", "95 % interval", "± over tasks", "± over runs", "tasks", "runs", "rollouts", "lost"]
    lines = [
        [
            _name(row),
            percent(row["success"]),
            between(*row["interval"]),
            percent(row["stderr"]),
            percent(row["run_stderr"]),
            str(row["num_tasks"]),
            str(len(row["run_means"])),
            str(row["num_samples"]),
            str(row["num_lost"]),
        ]
        for row in rows
    ]
    return text_table([heading, *lines])


def _pass_at(rows: Sequence[Mapping[str, Any]]) -> str:
    many = [row for row in rows if len(row["pass_at"]) > 1]
    if not many:
        return ""
    ks = sorted({int(k) for row in many for k in row["pass_at"]})
    lines = [[f"pass@{k}", *(_curve_cell(row["pass_at"].get(str(k))) for row in many)] for k in ks]
    return text_table([["k", *map(_name, many)], *lines])


def _curve_cell(values: Sequence[float] | None) -> str:
    return "-" if values is None else f"{percent(values[0])} {between(values[1], values[2])}"


def _costs(rows: Sequence[Mapping[str, Any]]) -> str:
    heading = [
        "mean per rollout",
        "turns",
        "commands",
        "sampled tokens",
        "all tokens",
        "seconds",
        "format errors / turn",
    ]
    lines = [
        [
            _name(row),
            f"{row['cost']['num_turns']:.1f}",
            f"{row['cost']['num_commands']:.1f}",
            f"{row['cost']['num_sampled_tokens']:.0f}",
            f"{row['cost']['num_tokens']:.0f}",
            f"{row['cost']['seconds']:.1f}",
            f"{row['format_errors_per_turn']:.3f}",
        ]
        for row in rows
    ]
    return text_table([heading, *lines])


def _outcomes(rows: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in OUTCOMES if any(name in row["outcomes"] for row in rows)]
    reasons = sorted({name for row in rows for name in row["stop_reasons"]})
    lines = [[name, *(_share(row["outcomes"], name) for row in rows), OUTCOMES[name]] for name in names]
    lines += [[f"ended: {name}", *(_share(row["stop_reasons"], name) for row in rows), ""] for name in reasons]
    return text_table([["outcome, % of rollouts", *map(_name, rows), ""], *lines])


def _share(counts: Mapping[str, int], name: str) -> str:
    total = sum(counts.values())
    return percent(counts.get(name, 0) / total) if total else "-"


def _parts(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """Success by a field of tasks, repositories with the most tasks first; nothing where all tasks agree."""
    sizes: dict[str, int] = {}
    for row in rows:
        for name, (_, _, count) in row[f"by_{key}"].items():
            sizes[name] = max(sizes.get(name, 0), count)
    if len(sizes) < 2:
        return ""
    names = sorted(sizes, key=lambda name: (-sizes[name] if key == "repository" else 0, name))
    lines = [[name, *(_part_cell(row[f"by_{key}"].get(name)) for row in rows)] for name in names[:SHOWN_PARTS]]
    left = len(names) - SHOWN_PARTS
    lines += [[f"and {left} more", *("" for _ in rows)]] if left > 0 else []
    return text_table([[key, *map(_name, rows)], *lines])


def _part_cell(values: Sequence[float] | None) -> str:
    return "-" if values is None else f"{percent(values[0])} ± {percent(values[1])} ({values[2]})"
