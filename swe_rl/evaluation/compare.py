"""Two policies on the same tasks: paired, because what makes a task hard is common to both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.evaluation.statistics import Difference, mcnemar, paired_difference, sign_flip_test

Outcomes = dict[str, list[float]]  # task -> 1.0 or 0.0 per attempt
# Lists of task ids in a report of SWE-bench; all tasks of a report are in one of them.
_REPORT_LISTS = ("resolved_ids", "unresolved_ids", "empty_patch_ids", "error_ids", "incomplete_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`first` against `second`; a positive difference means that the first is better."""

    difference: Difference  # of success rates, each task weighing the same, bootstrap over tasks
    p_sign: float  # sign-flip test of the same differences
    only_first: int  # of the first attempts: tasks that one of the two solves
    only_second: int
    both: int
    neither: int
    p_mcnemar: float  # exact, of the first attempts
    better: tuple[str, ...]  # tasks with a higher rate, the largest difference first
    worse: tuple[str, ...]


def compare(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]], *, seed: int = 0
) -> Comparison:
    """Over the tasks that both have. Raises ValueError without one."""
    difference = paired_difference(first, second, seed=seed)
    common = sorted(task for task in first if first[task] and second.get(task))
    gaps = {task: fmean(first[task]) - fmean(second[task]) for task in common}
    pairs = [(first[task][0] >= 1.0, second[task][0] >= 1.0) for task in common]
    only_first, only_second = pairs.count((True, False)), pairs.count((False, True))
    return Comparison(
        difference=difference,
        p_sign=sign_flip_test(list(gaps.values()), seed=seed),
        only_first=only_first,
        only_second=only_second,
        both=pairs.count((True, True)),
        neither=pairs.count((False, False)),
        p_mcnemar=mcnemar(only_first, only_second),
        better=tuple(sorted((t for t in common if gaps[t] > 0), key=lambda t: (-gaps[t], t))),
        worse=tuple(sorted((t for t in common if gaps[t] < 0), key=lambda t: (gaps[t], t))),
    )


def read_outcomes(spec: str) -> dict[str, Outcomes]:
    """Outcomes by "split mode", of what a command line names: PATH or PATH:PHASE, several joined by commas as attempts.

    PATH is a run directory or results.json of ours, a report of SWE-bench, or a JSON object task -> solved; the last
    two have one part, "". PHASE picks the rows of a training run, by default its last. ConfigError for anything else.
    """
    merged: dict[str, Outcomes] = {}
    for piece in spec.split(","):
        for part, outcomes in _read(piece).items():
            for task, values in outcomes.items():
                merged.setdefault(part, {}).setdefault(task, []).extend(values)
    return merged


def _read(piece: str) -> dict[str, Outcomes]:
    path, phase = Path(piece), ""
    if not path.exists() and ":" in piece:
        name, _, phase = piece.rpartition(":")
        path = Path(name)
    file = path / "results.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ConfigError(f"{piece} holds no results: {err}") from err
    if isinstance(data, list):
        return _of_rows(data, phase, piece)
    if phase:
        raise ConfigError(f"{piece}: only results of our own runs have phases")
    return {"": _of_report(data, piece)}


def _of_rows(rows: list[dict[str, Any]], phase: str, piece: str) -> dict[str, Outcomes]:
    try:
        phases = list(dict.fromkeys(row["phase"] for row in rows))
        if not phases or (phase and phase not in phases):
            raise ConfigError(
                f"{piece} has no results of phase {phase or '(any)'}: it has {', '.join(phases) or 'none'}"
            )
        chosen = [row for row in rows if row["phase"] == (phase or phases[-1])]
        return {f"{row['split']} {row['mode']}": dict(row["by_task"]) for row in chosen}
    except (KeyError, TypeError) as err:
        raise ConfigError(f"{piece} holds no results of ours: {err!r}") from err


def _of_report(data: Any, piece: str) -> Outcomes:
    if isinstance(data, dict) and "resolved_ids" in data:
        resolved = set(data["resolved_ids"])
        listed = {task for key in _REPORT_LISTS for task in data.get(key, [])}
        total = data.get("total_instances", len(listed))
        if len(listed) != total:
            raise ConfigError(
                f"{piece} names {len(listed)} of {total} tasks: the report was cut, nothing can be paired"
            )
        return {task: [float(task in resolved)] for task in sorted(listed)}
    if isinstance(data, dict) and data and all(isinstance(value, bool) for value in data.values()):
        return {task: [float(value)] for task, value in sorted(data.items())}
    raise ConfigError(f"{piece}: results.json, a SWE-bench report or an object task -> true or false is needed")
