"""Best@k: how often the candidate selected among k of the n rollouts of a task passes, over all subsets of size k.

A selector that ranks each candidate by itself has a closed form, exact for any n and k. The others (hybrid, majority)
are averaged over all subsets where these are few, else over random ones drawn with a seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from swe_rl.evaluation.candidates import Candidate
from swe_rl.evaluation.selection import SELECTORS, Selector
from swe_rl.evaluation.statistics import Difference, clustered_mean, paired_difference, rate_interval

MAX_SUBSETS = 1000  # of a task and a k


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Best@k of one selector over all tasks that have k candidates."""

    selector: str
    k: int
    rate: float
    low: float  # 95 % interval over tasks
    high: float
    gain: Difference  # over picking at random (pass@1) on the same tasks, paired
    num_tasks: int
    exact: bool  # all subsets counted; else a sample of them


def best_at_k(
    selector: Selector,
    candidates: Sequence[Candidate],
    k: int,
    *,
    keep: int = 1,
    max_subsets: int = MAX_SUBSETS,
    seed: int = 0,
) -> float:
    """Chance that the choice among k random candidates of one task passes. ValueError unless 1 <= k <= n and all have a
    ground truth."""
    passed = _truth(candidates)
    if not 1 <= k <= len(candidates):
        raise ValueError(f"best_at_k needs 1 <= k <= n, got k={k}, n={len(candidates)}")
    if selector.rank is not None:
        return _by_rank([selector.rank(item) for item in candidates], passed, k)
    chances = []
    for subset in subsets(len(candidates), k, max_subsets=max_subsets, seed=f"{seed}/{candidates[0].task_id}"):
        weights = selector.weights([candidates[i] for i in subset], keep=keep)
        chances.append(sum(weight * passed[i] for weight, i in zip(weights, subset, strict=True)))
    return math.fsum(chances) / len(chances)


def subsets(n: int, k: int, *, max_subsets: int, seed: str) -> Iterator[tuple[int, ...]]:
    """All subsets of size k of range(n) when there are at most `max_subsets`, else so many random ones."""
    if math.comb(n, k) <= max_subsets:
        yield from itertools.combinations(range(n), k)
        return
    draw = Random(f"subsets/{seed}/{n}/{k}")
    for _ in range(max_subsets):
        yield tuple(sorted(draw.sample(range(n), k)))


def is_exact(selector: Selector, n: int, k: int, *, max_subsets: int = MAX_SUBSETS) -> bool:
    """Whether `best_at_k` counts every subset."""
    return selector.rank is not None or math.comb(n, k) <= max_subsets


def curve(
    tasks: Mapping[str, Sequence[Candidate]],
    name: str,
    ks: Sequence[int],
    *,
    keep: int = 1,
    max_subsets: int = MAX_SUBSETS,
    seed: int = 0,
) -> list[Point]:
    """Best@k for each k over the tasks with at least k candidates; a k that no task reaches is left out.

    The same random subsets serve every selector, so that their difference is paired.
    """
    points = []
    for k in ks:
        fit = {task: items for task, items in tasks.items() if len(items) >= k}
        if not fit:
            continue
        options = {"keep": keep, "max_subsets": max_subsets, "seed": seed}
        rates = {task: [best_at_k(SELECTORS[name], items, k, **options)] for task, items in fit.items()}
        rate, error = clustered_mean(rates)
        low, high = rate_interval(rate, error, len(rates))
        points.append(
            Point(
                selector=name,
                k=k,
                rate=rate,
                low=low,
                high=high,
                gain=paired_difference(rates, {task: _truth(items) for task, items in fit.items()}, seed=seed),
                num_tasks=len(rates),
                exact=all(is_exact(SELECTORS[name], len(i), k, max_subsets=max_subsets) for i in fit.values()),
            )
        )
    return points


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, and `most` itself."""
    return sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most} - {0})


def _by_rank(keys: Sequence[tuple[float, ...]], passed: Sequence[float], k: int) -> float:
    """Σ over distinct keys of P(the best of k has this key) · (share of those with it that pass).

    With b better and e equal ones, P = [C(n - b, k) - C(n - b - e, k)] / C(n, k).
    """
    total, better, chance = math.comb(len(keys), k), 0, 0.0
    for key in sorted(set(keys), reverse=True):
        own = [value for other, value in zip(keys, passed, strict=True) if other == key]
        left = len(keys) - better
        chance += (math.comb(left, k) - math.comb(left - len(own), k)) / total * (sum(own) / len(own))
        better += len(own)
    return chance


def _truth(candidates: Sequence[Candidate]) -> list[float]:
    unknown = [item.trajectory_id for item in candidates if item.passed is None]
    if unknown:
        raise ValueError(f"{unknown[0]} was not graded, so no rate can be computed")
    return [float(bool(item.passed)) for item in candidates]
