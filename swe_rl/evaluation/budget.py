"""Spending test-time compute: stop when the verifier is confident, and rollouts against tokens.

`sequential` says what would happen with a stopping rule, in closed form from n scored rollouts per task, without new
sampling. `until_confident` applies the rule while sampling. `tokens_against_rollouts` asks DeepSWE's question (more
rollouts, or longer ones?) of one set of rollouts: an episode cut at L tokens is the beginning of the longer one, and
one that had not ended by then fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swe_rl.evaluation.best_of import best_at_k
from swe_rl.evaluation.candidates import Candidate
from swe_rl.evaluation.selection import SELECTORS
from swe_rl.evaluation.statistics import clustered_mean, pass_at_k, rate_interval
from swe_rl.protocols import Verifier
from swe_rl.rollout.collector import Collector
from swe_rl.types import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """What a stopping rule costs and achieves, mean over tasks."""

    threshold: float
    most: int  # rollouts that a task may have
    rate: float
    low: float  # 95 % interval over tasks
    high: float
    rollouts: float
    tokens: float  # sampled


def sequential(tasks: Mapping[str, Sequence[Candidate]], *, threshold: float, most: int) -> Spending:
    """Rollouts are drawn one at a time in random order; the first with ef_score >= threshold is handed in, and after
    `most` (of the n that there are, at most) the best score. Expectations over all orders, exact.

    With a of n at or above the threshold, P(none among the first j) = C(n - a, j) / C(n, j); the accepted one is any of
    the a, and when there is none the choice is Best@most of the others.
    """
    rates, rollouts, tokens = {}, [], []
    for task, items in tasks.items():
        rate, drawn, spent = _sequential(items, threshold, min(most, len(items)))
        rates[task] = [rate]
        rollouts.append(drawn)
        tokens.append(spent)
    rate, error = clustered_mean(rates)
    low, high = rate_interval(rate, error, len(rates))
    count = max(1, len(rates))
    return Spending(
        threshold=threshold,
        most=most,
        rate=rate,
        low=low,
        high=high,
        rollouts=math.fsum(rollouts) / count,
        tokens=math.fsum(tokens) / count,
    )


def _sequential(items: Sequence[Candidate], threshold: float, most: int) -> tuple[float, float, float]:
    """(chance of passing, expected rollouts, expected sampled tokens) for one task."""
    accepting = [item for item in items if _score(item) >= threshold]
    others = [item for item in items if _score(item) < threshold]
    n, a = len(items), len(accepting)
    none = [math.comb(n - a, j) / math.comb(n, j) for j in range(most + 1)]
    stopped = 1.0 - none[most]
    rate = stopped * sum(bool(item.passed) for item in accepting) / a if a else 0.0
    if none[most]:
        rate += none[most] * best_at_k(SELECTORS["ef"], others, most)
    drawn = math.fsum(none[:most])
    tokens = stopped * _mean_tokens(accepting) + (drawn - stopped) * _mean_tokens(others)
    return rate, drawn, tokens


def _score(item: Candidate) -> float:
    return -math.inf if item.trusted_score is None else item.trusted_score


def _mean_tokens(items: Sequence[Candidate]) -> float:
    return sum(item.num_tokens for item in items) / len(items) if items else 0.0


async def until_confident(
    collector: Collector,
    task: Task,
    verifier: Verifier,
    *,
    threshold: float,
    most: int,
    phase: str,
    temperature: float = 1.0,
) -> tuple[list[Trajectory], list[float]]:
    """(rollouts, their scores) of one task: the last is the first with a score of `threshold` or more, if any was.

    Rollouts that the machine lost are replaced, `most` at most. Resumable: a rollout in the journal is not repeated.
    """
    found: list[Trajectory] = []
    scores: list[float] = []
    for index in range(2 * most):
        if len(found) == most:
            break
        trajectory = await collector.run_one(task, index, phase=phase, step=0, temperature=temperature)
        if trajectory.stop_reason.is_infra:
            continue
        found.append(trajectory)
        scores.append(await verifier.score(task, trajectory))
        if scores[-1] >= threshold:
            break
    return found, scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """k rollouts of at most `limit` tokens each."""

    limit: int
    k: int
    tokens: float  # spent per task, mean
    pass_at_k: float
    best_at_k: float  # nan without scores


def tokens_against_rollouts(
    tasks: Mapping[str, Sequence[Candidate]], *, limits: Sequence[int], ks: Sequence[int], selector: str = ""
) -> list[Cell]:
    """Every pair of a token limit and a number of rollouts, over the tasks with at least k candidates.

    Tokens are all that an episode holds (`num_context_tokens`). Exact for a policy that is not told its limit; one that
    is reminded of it would hurry.
    """
    cells = []
    for limit in limits:
        cut = {task: [_cut(item, limit) for item in items] for task, items in tasks.items()}
        for k in ks:
            fit = [items for items in cut.values() if len(items) >= k]
            if not fit:
                continue
            bound = [pass_at_k(len(items), sum(bool(i.passed) for i in items), k) for items in fit]
            best = [best_at_k(SELECTORS[selector], items, k) for items in fit] if selector else [math.nan]
            spent = [k * sum(i.num_context_tokens for i in items) / len(items) for items in fit]
            cells.append(Cell(limit=limit, k=k, tokens=_mean(spent), pass_at_k=_mean(bound), best_at_k=_mean(best)))
    return cells


def _cut(item: Candidate, limit: int) -> Candidate:
    """As if the episode had been allowed `limit` tokens: unfinished ones fail, and no verifier has judged them."""
    if item.num_context_tokens <= limit:
        return item
    return replace(item, num_context_tokens=limit, passed=False, ef_score=None, ef_flag="", patch_digest="")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
