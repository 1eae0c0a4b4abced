"""Intervals and tests of rates: against tables, enumeration and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from swe_rl.evaluation.statistics import (
    clustered_mean,
    mcnemar,
    mean_of_runs,
    paired_difference,
    pass_at_k,
    rate_interval,
    sign_flip_test,
    student_t_quantile,
    wilson_interval,
)

COVERED = (0.93, 0.97)


@pytest.mark.parametrize(
    ("dof", "probability", "value"),
    [(1, 0.975, 12.7062), (2, 0.975, 4.30265), (9, 0.975, 2.26216), (49, 0.975, 2.00958), (499, 0.995, 2.58572)],
)
def test_student_t_as_in_tables(dof: int, probability: float, value: float) -> None:
    assert student_t_quantile(probability, dof) == pytest.approx(value, rel=2e-5)


def test_student_t_refuses_what_has_no_quantile() -> None:
    for probability, dof in ((0.5, 3), (1.0, 3), (0.9, 0)):
        with pytest.raises(ValueError, match="dof"):
            student_t_quantile(probability, dof)


@pytest.mark.parametrize("n", range(1, 13))
def test_pass_at_k_against_brute_force_up_to_twelve(n: int) -> None:
    for correct in range(n + 1):
        outcomes = [i < correct for i in range(n)]
        for k in range(1, n + 1):
            hits = [any(outcomes[i] for i in subset) for subset in itertools.combinations(range(n), k)]
            assert pass_at_k(n, correct, k) == pytest.approx(sum(hits) / len(hits), abs=1e-12)


def test_wilson_interval_by_its_definition() -> None:
    """Its ends solve |rate - p| = z sqrt(p (1 - p) / n)."""
    for rate, count in ((0.0, 7), (0.3, 10), (1.0, 64)):
        for end in wilson_interval(rate, count):
            assert abs(rate - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / count), abs=1e-6)


def test_an_error_of_zero_is_no_certainty() -> None:
    low, high = rate_interval(1.0, 0.0, 20)
    assert 0.8 < low < 0.9
    assert high == 1.0
    assert rate_interval(0.5, 0.1, 1)[0] != rate_interval(0.5, 0.1, 1)[0], "nan: one task says nothing about others"
    assert rate_interval(0.02, 0.03, 10)[0] == 0.0


def test_mean_of_runs() -> None:
    mean, error = mean_of_runs([0.40, 0.44, 0.42])
    assert mean == pytest.approx(0.42)
    assert error == pytest.approx(0.02 / math.sqrt(3))
    assert math.isnan(mean_of_runs([0.4])[1])
    assert math.isnan(mean_of_runs([])[0])


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (3, 3), (0, 6), (2, 9), (15, 4)])
def test_mcnemar_against_all_ways_the_pairs_may_fall(first: int, second: int) -> None:
    pairs = first + second
    ways = [sum(way) for way in itertools.product((0, 1), repeat=min(pairs, 12))] if pairs <= 12 else []
    if ways:
        far = [abs(2 * count - pairs) >= abs(first - second) for count in ways]
        assert mcnemar(first, second) == pytest.approx(sum(far) / len(far))
    else:
        assert mcnemar(first, second) == pytest.approx(0.019211, abs=1e-6)  # R: binom.test(4, 19)
    assert mcnemar(first, second) == mcnemar(second, first)


def test_sign_flips_against_enumeration_and_drawn_ones_near_it() -> None:
    differences = [0.5, -0.25, 0.0, 0.75, 0.25, -0.5, 1.0]
    values = [d for d in differences if d]
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in itertools.product((1, -1), repeat=6)
    ]
    want = sum(value >= abs(sum(values)) - 1e-12 for value in sums) / len(sums)
    assert sign_flip_test(differences) == pytest.approx(want)
    assert sign_flip_test([0.0, 0.0]) == 1.0
    many = [0.1 * ((i * 7) % 11 - 4) for i in range(40)]
    spread = math.sqrt(sum(value**2 for value in many))
    normal = math.erfc(abs(sum(many)) / spread / math.sqrt(2))
    assert sign_flip_test(many) == pytest.approx(normal, abs=0.02)


def test_intervals_over_tasks_cover_the_rate_of_the_task_distribution() -> None:
    """60 tasks whose rates are Beta(0.6, 1.2), 4 attempts each: the error must allow for both kinds of chance."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(2000):
        rates = rng.beta(0.6, 1.2, size=60)
        hits = rng.random((60, 4)) < rates[:, None]
        mean, error = clustered_mean({str(i): row for i, row in enumerate(hits.astype(float))})
        low, high = rate_interval(mean, error, 60)
        inside += low <= 0.6 / 1.8 <= high
    assert COVERED[0] <= inside / 2000 <= COVERED[1]


def test_intervals_over_runs_cover_the_rate_of_the_same_tasks() -> None:
    """8 runs over 40 tasks: only sampling is chance."""
    rng = np.random.default_rng(2)
    rates = rng.beta(0.6, 1.2, size=40)
    inside = 0
    for _ in range(2000):
        runs = (rng.random((8, 40)) < rates).mean(axis=1)
        mean, error = mean_of_runs(list(runs))
        low, high = rate_interval(mean, error, 8)
        inside += low <= rates.mean() <= high
    assert COVERED[0] <= inside / 2000 <= COVERED[1]


def test_intervals_of_pass_at_k_cover_it() -> None:
    rng = np.random.default_rng(3)
    truth = float(np.mean(1 - (1 - rng.beta(0.6, 1.2, size=400_000)) ** 4))
    inside = 0
    for _ in range(1500):
        counts = rng.binomial(8, rng.beta(0.6, 1.2, size=60))
        mean, error = clustered_mean({str(i): [pass_at_k(8, int(c), 4)] for i, c in enumerate(counts)})
        low, high = rate_interval(mean, error, 60)
        inside += low <= truth <= high
    assert COVERED[0] <= inside / 1500 <= COVERED[1]


def test_bootstrap_of_paired_differences_covers_them() -> None:
    rng = np.random.default_rng(4)
    inside = 0
    for round_ in range(500):
        rates = rng.beta(1.0, 1.0, size=100)
        before = rng.random((100, 2)) < rates[:, None]
        after = rng.random((100, 2)) < np.minimum(rates + 0.1 * (1 - rates), 1.0)[:, None]
        found = paired_difference(
            {str(i): row for i, row in enumerate(after.astype(float))},
            {str(i): row for i, row in enumerate(before.astype(float))},
            num_resamples=600,
            seed=round_,
        )
        inside += found.low <= 0.05 <= found.high
    assert COVERED[0] <= inside / 500 <= COVERED[1]
