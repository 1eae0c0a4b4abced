"""Knowing when not to answer: risk against coverage for a measure of confidence.

Answers are given from the most confident one down; coverage is the share of tasks answered, risk the share of answers
that are wrong. A policy that calls the `abstain` tool has answered nothing, whatever else is known of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swe_rl.evaluation.candidates import Candidate
from swe_rl.evaluation.selection import SELECTORS, select_one

CONFIDENCE: dict[str, Callable[[Candidate], float | None]] = {
    "verifier": lambda item: item.trusted_score,
    "entropy": lambda item: item.mean_logprob,  # minus an estimate of the policy's entropy
    "short": lambda item: -float(item.num_turns),
}


@dataclass(frozen=True, slots=True)
class RiskPoint:
    threshold: float  # answers are given from this confidence on
    coverage: float
    risk: float


def risk_coverage(confidence: Sequence[float], passed: Sequence[bool]) -> list[RiskPoint]:
    """One point per distinct confidence, coverage rising; [] without answers. -inf is never answered.

    Equal confidences are answered together. Risk is wrong / answered (El-Yaniv and Wiener 2010).
    """
    pairs = sorted(zip(confidence, passed, strict=True), key=lambda pair: -pair[0])
    points: list[RiskPoint] = []
    answered = wrong = 0
    for place, (value, right) in enumerate(pairs):
        if value == -math.inf:
            break
        answered += 1
        wrong += not right
        if place + 1 == len(pairs) or pairs[place + 1][0] != value:
            points.append(RiskPoint(value, answered / len(pairs), wrong / answered))
    return points


def area_under_risk(confidence: Sequence[float], passed: Sequence[bool]) -> float:
    """Mean risk over the answers, as they are added one by one, equal confidences in random order; nan without any.

    With a right and b wrong answers before a block of m of which w are wrong, the expected number of wrong ones after
    j of the block is b + j·w/m. The area of a perfect order is its lower bound (`perfect_area`).
    """
    total, answered, wrong = 0.0, 0, 0.0
    blocks: dict[float, list[bool]] = {}
    for value, right in zip(confidence, passed, strict=True):
        if value != -math.inf:
            blocks.setdefault(value, []).append(right)
    for value in sorted(blocks, reverse=True):
        share = sum(not right for right in blocks[value]) / len(blocks[value])
        for _ in blocks[value]:
            answered += 1
            wrong += share
            total += wrong / answered
    return total / answered if answered else math.nan


def perfect_area(passed: Sequence[bool]) -> float:
    """`area_under_risk` when all right answers come before all wrong ones."""
    return area_under_risk([float(right) for right in passed], passed)


def answers(tasks: Mapping[str, Sequence[Candidate]], *, selector: str = "") -> list[Candidate]:
    """The answers that may be given: one per task, by a selector, or every rollout where none is named.

    Of ties the first by trajectory id; a task whose chosen rollout abstained keeps it.
    """
    if not selector:
        return [item for items in tasks.values() for item in items]
    return [select_one(SELECTORS[selector], items) for items in tasks.values()]


def confidences(items: Sequence[Candidate], measure: str) -> list[float]:
    """By a name of CONFIDENCE; -inf for an abstention, a missing value, and a patch that changes nothing."""
    found = []
    for item in items:
        value = CONFIDENCE[measure](item)
        unanswered = item.abstained or not item.patch or value is None or math.isnan(value)
        found.append(-math.inf if unanswered else float(value or 0.0))
    return found
