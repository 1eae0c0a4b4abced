"""Success rates with their uncertainty. Pure functions; a task is the independent unit, its samples are not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

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


def mean_of_runs(run_means: Sequence[float]) -> tuple[float, float]:
    """(mean, standard error of the mean) over independent runs of the same tasks: s/√n; nan below two runs.

    What "Pass@1 ± SEM over 10 runs" means: the noise of sampling alone, tasks held fixed.
    """
    if not run_means:
        return math.nan, math.nan
    values = np.asarray(run_means, dtype=np.float64)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return float(values.mean()), error


def rate_interval(rate: float, stderr: float, count: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided interval of a rate with a standard error from `count` independent units (tasks or runs), in [0, 1].

    rate ± t(count - 1) · stderr. Where all units agree the error is 0 and says nothing: Wilson's interval then, as for
    `count` independent trials. (nan, nan) without an error or below two units.
    """
    if count < 2 or math.isnan(stderr) or math.isnan(rate):
        return math.nan, math.nan
    if stderr == 0.0:
        return wilson_interval(rate, count, confidence=confidence)
    half = student_t_quantile(0.5 + confidence / 2.0, count - 1) * stderr
    return max(0.0, rate - half), min(1.0, rate + half)


def wilson_interval(rate: float, count: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval (1927) of a proportion of `count` independent trials."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    scale = 1.0 + z * z / count
    centre = (rate + z * z / (2 * count)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


@cache
def student_t_quantile(probability: float, dof: int) -> float:
    """The value that Student's t with `dof` degrees of freedom stays below with `probability` (0.5 to 1, exclusive)."""
    if not 0.5 < probability < 1.0 or dof < 1:
        raise ValueError(f"needs 0.5 < probability < 1 and dof >= 1, got {probability} and {dof}")
    low, high = 0.0, 1.0
    while _t_tail(high, dof) > 1.0 - probability:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _t_tail(middle, dof) > 1.0 - probability else (low, middle)
    return (low + high) / 2.0


def _t_tail(value: float, dof: int) -> float:
    """P(t > value), value >= 0. With t = √ν tan φ the density is cos(φ)^(ν-1) / B on (0, π/2): a smooth integral."""
    angle = math.atan(value / math.sqrt(dof))
    nodes, weights = _gauss_legendre()
    points = angle + (math.pi / 2 - angle) * (nodes + 1.0) / 2.0
    density = np.cos(points) ** (dof - 1)
    log_norm = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(math.pi)
    return float((weights * density).sum() * (math.pi / 2 - angle) / 2.0 * math.exp(log_norm))


@cache
def _gauss_legendre() -> tuple[np.ndarray, np.ndarray]:
    """64 nodes in [-1, 1] and their weights."""
    nodes, weights = np.polynomial.legendre.leggauss(64)
    return nodes, weights


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p of McNemar's test: pairs that only one of two policies solves fall either way by chance.

    Twice the binomial tail of the smaller count, at most 1.
    """
    if min(only_first, only_second) < 0:
        raise ValueError(f"counts must be 0 or more, got {only_first} and {only_second}")
    pairs, smaller = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(pairs, i) for i in range(smaller + 1))
    return min(1.0, 2.0 * tail / 2**pairs)


def sign_flip_test(differences: Sequence[float], *, num_draws: int = 20_000, seed: int = 0) -> float:
    """Two-sided p that the mean of paired differences is 0: how often random signs give a mean as far from it.

    Exact over all signs up to 14 differences other than 0, else by `num_draws` draws (the observed signs are one more).
    """
    values = np.array([value for value in differences if value != 0.0], dtype=np.float64)
    if not len(values):
        return 1.0
    bound = abs(values.sum()) * (1 - 1e-12)
    if len(values) <= 14:
        signs = 1 - 2 * ((np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1)
        return float((np.abs(signs @ values) >= bound).mean())
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(num_draws, len(values)))
    return float((1 + (np.abs(signs @ values) >= bound).sum()) / (num_draws + 1))
