"""The tables that `swe-rl verify select` writes as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swe_rl.cli.text_table import text_table
from swe_rl.evaluation.abstention import (
    CONFIDENCE,
    RiskPoint,
    answers,
    area_under_risk,
    confidences,
    perfect_area,
    risk_coverage,
)
from swe_rl.evaluation.best_of import Point, powers_of_two
from swe_rl.evaluation.budget import Cell, sequential, tokens_against_rollouts
from swe_rl.evaluation.candidates import Candidate
from swe_rl.training.run_dir import write_atomic

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 2.0)  # 2: never confident, all rollouts are drawn
Tasks = Mapping[str, Sequence[Candidate]]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with equal keys; an empty file without rows."""
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_atomic(path, text.getvalue().encode())


def point_rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """One row per selector and k."""
    return [
        {
            "selector": point.selector,
            "k": point.k,
            "best_at_k": _short(point.rate),
            "low": _short(point.low),
            "high": _short(point.high),
            "gain": _short(point.gain.mean),
            "gain_low": _short(point.gain.low),
            "gain_high": _short(point.gain.high),
            "tasks": point.num_tasks,
            "subsets": "all" if point.exact else "sampled",
        }
        for point in points
    ]


def risk_curves(tasks: Tasks) -> dict[str, list[RiskPoint]]:
    """Risk against coverage over all rollouts, for every measure of confidence that any of them has."""
    items = answers(tasks)
    passed = [bool(item.passed) for item in items]
    curves = {measure: risk_coverage(confidences(items, measure), passed) for measure in CONFIDENCE}
    return {measure: points for measure, points in curves.items() if points}


def abstention_rows(tasks: Tasks) -> list[dict[str, Any]]:
    """One row per measure of confidence and threshold."""
    return [
        {
            "confidence": measure,
            "threshold": _short(point.threshold),
            "coverage": _short(point.coverage),
            "risk": _short(point.risk),
        }
        for measure, points in risk_curves(tasks).items()
        for point in points
    ]


def abstention_summary(tasks: Tasks) -> str:
    """A line: the mean risk while answers are added from the most confident one down, by measure, beside that of a
    perfect order and of none; and what the `abstain` tool did."""
    items = answers(tasks)
    answered = [item for item in items if confidences([item], "short")[0] != -math.inf]
    passed = [bool(item.passed) for item in answered]
    if not answered:
        return "abstention: nothing was answered"
    areas = {measure: area_under_risk(confidences(answered, measure), passed) for measure in CONFIDENCE}
    shown = [f"{measure} {area:.3f}" for measure, area in areas.items() if not math.isnan(area)]
    none = passed.count(False) / len(passed)
    abstained = sum(item.abstained for item in items)
    tool = f"; the policy abstained in {abstained} of {len(items)} rollouts" if abstained else ""
    return (
        f"abstention, mean risk by confidence: {', '.join(shown)} (perfect {perfect_area(passed):.3f}, none {none:.3f})"
        f", {len(answered)} of {len(items)} rollouts changed something{tool}"
    )


def sequential_rows(tasks: Tasks) -> list[dict[str, Any]]:
    """One row per threshold and largest number of rollouts."""
    most = max(len(items) for items in tasks.values())
    rows = []
    for limit in powers_of_two(most):
        for threshold in THRESHOLDS:
            found = sequential(tasks, threshold=threshold, most=limit)
            rows.append(
                {
                    "most": limit,
                    "threshold": threshold,
                    "success": _short(found.rate),
                    "low": _short(found.low),
                    "high": _short(found.high),
                    "rollouts": _short(found.rollouts),
                    "sampled_tokens": _short(found.tokens),
                }
            )
    return rows


def default_limits(tasks: Tasks) -> list[int]:
    """An eighth, a quarter, a half and all of the tokens of the longest episode; [] where tokens were not counted."""
    longest = max(item.num_context_tokens for items in tasks.values() for item in items)
    return sorted({-(-longest // part) for part in (8, 4, 2, 1)} - {0})


def token_cells(tasks: Tasks, limits: Sequence[int]) -> list[Cell]:
    """Every token limit with 1, 2, 4, ... rollouts; best_at_k by the verifier's score where all have one, else nan."""
    scored = all(item.ef_score is not None for items in tasks.values() for item in items)
    ks = powers_of_two(min(len(items) for items in tasks.values()))
    return tokens_against_rollouts(tasks, limits=sorted(set(limits)), ks=ks, selector="ef" if scored else "")


def token_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One row per token limit and number of rollouts."""
    return [
        {
            "limit": cell.limit,
            "k": cell.k,
            "tokens": _short(cell.tokens),
            "pass_at_k": _short(cell.pass_at_k),
            "best_at_k": "" if math.isnan(cell.best_at_k) else _short(cell.best_at_k),
        }
        for cell in cells
    ]


def token_table(cells: Sequence[Cell]) -> str:
    """Limits down, rollouts across: pass@k, and Best@k where there are scores, with the tokens of a task."""
    ks = sorted({cell.k for cell in cells})
    found = {(cell.limit, cell.k): cell for cell in cells}
    rows = [["pass@k / Best@k, % (tokens of a task)", *map(str, ks)]]
    for limit in sorted({cell.limit for cell in cells}):
        own = [found[limit, k] for k in ks]
        best = ["" if math.isnan(cell.best_at_k) else f" / {100 * cell.best_at_k:.1f}" for cell in own]
        shown = [f"{100 * cell.pass_at_k:.1f}{b} ({cell.tokens:,.0f})" for cell, b in zip(own, best, strict=True)]
        rows.append([f"at most {limit:,} tokens each", *shown])
    return text_table(rows)


def _short(value: float) -> str:
    return f"{value:.6g}"
