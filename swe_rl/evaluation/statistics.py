"""Success rates with their uncertainty. Pure functions; a task is the independent unit, its samples are not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that k samples, drawn without replacement from `num_samples` of which `num_correct` pass, hold one that
    passes.

    1 - C(n-c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), as a stable product.
    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n, got n={num_samples}, c={num_correct}, k={k}")
    if num_samples - num_correct < k:
        return 1.0
    none = math.prod((num_samples - num_correct - i) / (num_samples - i) for i in range(k))
    return 1.0 - none


def clustered_mean(samples: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """(mean over all samples, its standard error), samples grouped by task.

    Cluster-robust variance of a ratio: G/(G-1) Σ_g (Σ_i (x_gi - mean))² / N², which allows any correlation within a
    task and tasks of different sizes; with one sample per task it is the usual s/√n. The error is nan below two tasks,
    the mean below one.
    """
    values = [np.asarray(group, dtype=np.float64) for group in samples.values() if len(group)]
    if not values:
        return math.nan, math.nan
    total = sum(len(group) for group in values)
    mean = float(sum(group.sum() for group in values) / total)
    clusters = len(values)
    if clusters < 2:
        return mean, math.nan
    spread = sum(float((group - mean).sum()) ** 2 for group in values)
    return mean, math.sqrt(clusters / (clusters - 1) * spread) / total


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean of per-task differences with a bootstrap interval."""

    mean: float
    low: float
    high: float
    num_tasks: int


def paired_difference(
    after: Mapping[str, Sequence[float]],
    before: Mapping[str, Sequence[float]],
    *,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Difference:
    """How much `after` is better than `before` on the tasks that both have, each task weighing the same.

    Percentile bootstrap over tasks, so that what makes a task hard cancels. To pool seeds, give the keys of each seed
    their own prefix. Raises ValueError without a common task.
    """
    common = sorted(key for key in after if len(after[key]) and len(before.get(key, ())))
    if not common:
        raise ValueError("the two results have no task in common")
    differences = np.array([np.mean(after[key]) - np.mean(before[key]) for key in common])
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(common), size=(num_resamples, len(common)))
    means = differences[picks].mean(axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Difference(mean=float(differences.mean()), low=float(low), high=float(high), num_tasks=len(common))
