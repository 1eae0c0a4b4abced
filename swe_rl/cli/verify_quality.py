"""How good the scores of a verifier are where the hidden tests are known: numbers, and two curves on one page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from swe_rl.cli.report import STYLE
from swe_rl.cli.svg import Series, line_chart
from swe_rl.evaluation.calibration import auc, brier_score, expected_calibration_error, reliability, roc_curve
from swe_rl.evaluation.candidates import Candidate
from swe_rl.training.run_dir import write_atomic


def write_quality(directory: Path, candidates: Sequence[Candidate]) -> str:
    """Writes verifier_quality.json and verifier_quality.html, and returns what they say in one line. Candidates without
    ground truth, or whose score is flagged, are counted and left out."""
    known = [item for item in candidates if item.passed is not None and item.ef_score is not None]
    used = [item for item in known if not item.ef_flag]
    scores, labels = [item.ef_score or 0.0 for item in used], [bool(item.passed) for item in used]
    within = {task: auc([s for s, _ in pairs], [label for _, label in pairs]) for task, pairs in _by_task(used).items()}
    mixed = [value for value in within.values() if not math.isnan(value)]
    numbers = {
        "candidates": len(candidates),
        "flagged": len(known) - len(used),
        "solved": sum(labels),
        "auc": _finite(auc(scores, labels)),
        "auc_within_task": fmean(mixed) if mixed else None,  # what selection lives on: the task itself is no help there
        "mixed_tasks": len(mixed),
        "ece": _finite(expected_calibration_error(scores, labels)),
        "brier": _finite(brier_score(scores, labels)),
        "reliability": [
            {"low": part.low, "high": part.high, "count": part.count, "score": _finite(part.mean_score)}
            | {"solved": _finite(part.share_true)}
            for part in reliability(scores, labels)
        ],
    }
    write_atomic(directory / "verifier_quality.json", json.dumps(numbers, indent=1).encode())
    write_atomic(directory / "verifier_quality.html", _page(scores, labels).encode())
    shown = {key: _shown(numbers[key]) for key in ("auc", "auc_within_task", "ece", "brier")}  # type: ignore[arg-type]
    return (
        f"execution-free verifier on {len(used)} held-out attempts ({numbers['flagged']} flagged): AUC {shown['auc']}, "
        f"within tasks {shown['auc_within_task']} ({len(mixed)} tasks), ECE {shown['ece']}, Brier {shown['brier']}"
    )


def _by_task(candidates: Sequence[Candidate]) -> dict[str, list[tuple[float, bool]]]:
    found: dict[str, list[tuple[float, bool]]] = {}
    for item in candidates:
        found.setdefault(item.task_id, []).append((item.ef_score or 0.0, bool(item.passed)))
    return found


def _page(scores: Sequence[float], labels: Sequence[bool]) -> str:
    charts = []
    if len(set(labels)) == 2:
        points = roc_curve(scores, labels)
        curve = Series(label="verifier", x=[x for x, _ in points], y=[y for _, y in points], colour=0)
        chance = Series(label="chance", x=[0.0, 1.0], y=[0.0, 1.0], colour=5)
        charts.append(line_chart("ROC: failed attempts accepted, solved ones accepted", [curve, chance]))
    parts = [part for part in reliability(scores, labels) if part.count]
    if parts:
        found = Series(label="share solved", x=[p.mean_score for p in parts], y=[p.share_true for p in parts], colour=0)
        ideal = Series(label="calibrated", x=[0.0, 1.0], y=[0.0, 1.0], colour=5)
        charts.append(line_chart("Reliability: score, share solved", [found, ideal]))
    body = f'<h1>Execution-free verifier</h1><div class="charts">{"".join(charts)}</div>'
    return f'<!doctype html><meta charset="utf-8"><title>Verifier</title><style>{STYLE}</style>{body}\n'


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
