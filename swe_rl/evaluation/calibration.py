"""How good a score is: does it rank (ROC, AUC), and is it a probability (reliability, expected calibration error)?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


def roc_curve(scores: Sequence[float], labels: Sequence[bool]) -> list[tuple[float, float]]:
    """Points (share of false ones accepted, share of true ones accepted) as the threshold falls, (0, 0) to (1, 1).

    Equal scores make one step: their order says nothing. Raises ValueError unless both kinds are there.
    """
    _check(scores, labels)
    total = [sum(not label for label in labels), sum(bool(label) for label in labels)]
    if 0 in total:
        raise ValueError("a ROC curve needs true and false labels")
    points, seen, last = [(0.0, 0.0)], [0, 0], math.inf
    for score, label in sorted(zip(scores, labels, strict=True), key=lambda pair: -pair[0]):
        if score != last and seen != [0, 0]:
            points.append((seen[0] / total[0], seen[1] / total[1]))
        seen[bool(label)] += 1
        last = score
    return [*points, (1.0, 1.0)]


def auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Area under the ROC curve: the chance that a true one scores higher than a false one, ties counting half.

    nan unless both kinds are there.
    """
    if len(set(map(bool, labels))) < 2:
        _check(scores, labels)
        return math.nan
    points = roc_curve(scores, labels)
    return sum((x1 - x0) * (y0 + y1) / 2.0 for (x0, y0), (x1, y1) in pairwise(points))


@dataclass(frozen=True, slots=True)
class Bin:
    """Scores in (low, high], the first bin with its lower end."""

    low: float
    high: float
    count: int
    mean_score: float  # nan when empty
    share_true: float  # nan when empty


def reliability(scores: Sequence[float], labels: Sequence[bool], *, num_bins: int = 10) -> list[Bin]:
    """Equally wide bins over [0, 1]. Raises ValueError for a score outside of it."""
    _check(scores, labels)
    if any(not 0.0 <= score <= 1.0 for score in scores):
        raise ValueError("scores of a reliability curve must be between 0 and 1")
    edges = [index / num_bins for index in range(num_bins + 1)]
    members: list[list[tuple[float, bool]]] = [[] for _ in range(num_bins)]
    for score, label in zip(scores, labels, strict=True):
        place = max(0, int(np.searchsorted(edges, score, side="left")) - 1)
        members[place].append((score, bool(label)))
    return [
        Bin(low, high, len(part), _mean([s for s, _ in part]), _mean([float(label) for _, label in part]))
        for low, high, part in zip(edges, edges[1:], members, strict=False)
    ]


def expected_calibration_error(scores: Sequence[float], labels: Sequence[bool], *, num_bins: int = 10) -> float:
    """Σ_b n_b/n |mean score - share of true ones| over the bins (Naeini et al. 2015); nan without scores."""
    bins = reliability(scores, labels, num_bins=num_bins)
    total = sum(part.count for part in bins)
    gaps = (part.count * abs(part.mean_score - part.share_true) for part in bins if part.count)
    return math.fsum(gaps) / total if total else math.nan


def brier_score(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Mean squared difference between score and outcome; nan without scores."""
    _check(scores, labels)
    return _mean([(score - bool(label)) ** 2 for score, label in zip(scores, labels, strict=True)])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _check(scores: Sequence[float], labels: Sequence[bool]) -> None:
    if len(scores) != len(labels):
        raise ValueError(f"{len(scores)} scores for {len(labels)} labels")
    if any(not math.isfinite(score) for score in scores):
        raise ValueError("a score is not finite")
