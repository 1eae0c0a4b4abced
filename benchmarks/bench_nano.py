"""Pools runs of the nano experiment over seeds: success per phase, and what each phase added, with 95 % intervals.

    python benchmarks/bench_nano.py runs/SEED0 runs/SEED1 runs/SEED2 [--write benchmarks/baselines/nano.csv]

Differences are paired by task and pooled over seeds (bootstrap over tasks); a phase is compared with the one before it,
and the last one with the first trained one. A run that began with `init_weights` of a phase has that phase's row under
the name "base": --began-with PHASE says so.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from swe_rl.evaluation import paired_difference

FIELDS = ("split", "mode", "phase", "success", "stderr", "gain", "gain_low", "gain_high", "num_tasks", "num_runs")


def pooled(runs: Sequence[Sequence[Mapping[str, Any]]], *, split: str, mode: str, phase: str) -> dict[str, list[float]]:
    """Attempts by "run/task" over the runs that have this row."""
    found: dict[str, list[float]] = {}
    for number, rows in enumerate(runs):
        for row in rows:
            if (row["split"], row["mode"], row["phase"]) == (split, mode, phase):
                found |= {f"{number}/{task}": values for task, values in row["by_task"].items()}
    return found


def renamed(rows: Sequence[Mapping[str, Any]], began_with: str) -> list[dict[str, Any]]:
    """Rows of one run; when it has no phase `began_with`, its row "base" is that phase."""
    is_base = bool(began_with) and all(row["phase"] != began_with for row in rows)
    return [{**row, "phase": began_with if is_base and row["phase"] == "base" else row["phase"]} for row in rows]


def table(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One row per split, mode and phase; `gain` is over the phase before, on the tasks that both have."""
    cells = list(dict.fromkeys((row["split"], row["mode"]) for rows in runs for row in rows))
    phases = list(dict.fromkeys(row["phase"] for rows in runs for row in rows))
    lines = []
    for split, mode in cells:
        before: dict[str, list[float]] = {}
        for phase in phases:
            now = pooled(runs, split=split, mode=mode, phase=phase)
            if not now:
                continue
            rate = fmean(value for values in now.values() for value in values)
            line = {"split": split, "mode": mode, "phase": phase, "success": round(rate, 4), "num_tasks": len(now)}
            line["stderr"] = round(math.sqrt(rate * (1 - rate) / len(now)), 4)
            line["num_runs"] = len({key.partition("/")[0] for key in now})
            if before:
                gain = paired_difference(now, before)
                line |= {"gain": round(gain.mean, 4), "gain_low": round(gain.low, 4), "gain_high": round(gain.high, 4)}
            lines.append(line)
            before = now
        first = pooled(runs, split=split, mode=mode, phase="warm_start")
        if before and first:
            whole = paired_difference(before, first)
            line = {"split": split, "mode": mode, "phase": "warm_start to end", "num_tasks": len(first)}
            line |= {"gain": round(whole.mean, 4), "gain_low": round(whole.low, 4), "gain_high": round(whole.high, 4)}
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, help="CSV to write beside printing")
    parser.add_argument("--began-with", default="", metavar="PHASE", help="of runs with init_weights")
    arguments = parser.parse_args()
    found = [json.loads((run / "results.json").read_text()) for run in arguments.runs]
    lines = table([renamed(rows, arguments.began_with) for rows in found])
    for line in lines:
        gain = (
            f"  {100 * line['gain']:+.1f} [{100 * line['gain_low']:+.1f}, {100 * line['gain_high']:+.1f}]"
            if "gain" in line
            else ""
        )
        label = f"{line['split']} {line['mode']} {line['phase']}"
        success = f"{100 * line['success']:5.1f} ± {100 * line['stderr']:.1f}" if "success" in line else " " * 11
        print(f"{label:36} {success}  n={line['num_tasks']}{gain}")
    if arguments.write:
        with open(arguments.write, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
