"""Estimators against enumeration, textbook values and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from swe_rl.evaluation import clustered_mean, paired_difference, pass_at_k


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_equals_enumeration(n: int) -> None:
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        picks = list(itertools.combinations(range(n), k))
        want = sum(any(i < correct for i in pick) for pick in picks) / len(picks)
        assert pass_at_k(n, correct, k) == pytest.approx(want, abs=1e-12)


def test_pass_at_k_large_is_stable() -> None:
    assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5, rel=1e-9)
    assert pass_at_k(10_000, 5, 5000) == pytest.approx(1 - 0.5**5, abs=1e-3)


@pytest.mark.parametrize(("n", "c", "k"), [(0, 0, 1), (3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_refuses(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass_at_k needs"):
        pass_at_k(n, c, k)


def test_clustered_mean_with_single_samples_is_the_usual_standard_error() -> None:
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    mean, error = clustered_mean({str(i): [v] for i, v in enumerate(values)})
    assert mean == pytest.approx(0.6)
    assert error == pytest.approx(np.std(values, ddof=1) / math.sqrt(5))


def test_repeating_a_sample_within_its_task_adds_no_information() -> None:
    once = {str(i): [float(i % 3 == 0)] for i in range(11)}
    often = {key: values * 4 for key, values in once.items()}
    assert clustered_mean(once) == pytest.approx(clustered_mean(often))


def test_clustered_mean_of_little() -> None:
    assert all(math.isnan(value) for value in clustered_mean({}))
    assert all(math.isnan(value) for value in clustered_mean({"a": []}))
    mean, error = clustered_mean({"a": [1.0, 0.0]})
    assert mean == 0.5
    assert math.isnan(error)


def test_clustered_error_matches_simulation() -> None:
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(2000):
        rates = rng.beta(1, 1, size=40)
        mean, error = clustered_mean({str(i): list(rng.random(3) < rate) for i, rate in enumerate(rates)})
        means.append(mean)
        errors.append(error)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.05)


def test_paired_difference_covers_and_cancels_difficulty() -> None:
    rng = np.random.default_rng(1)
    difficulty = rng.random(200)
    before = {str(i): [float(d > 0.5)] for i, d in enumerate(difficulty)}
    after = {str(i): [float(d > 0.4)] for i, d in enumerate(difficulty)}
    got = paired_difference(after, before)
    want = np.mean([(d > 0.4) - float(d > 0.5) for d in difficulty])
    assert got.mean == pytest.approx(want)
    assert 0 < got.low < got.mean < got.high
    assert got.num_tasks == 200
    spread = math.sqrt(want * (1 - want) / 200)
    assert got.high - got.low == pytest.approx(2 * 1.96 * spread, rel=0.15)
    assert paired_difference(after, before) == got


def test_paired_difference_uses_common_tasks_only() -> None:
    got = paired_difference({"a": [1.0, 0.0], "b": [1.0], "x": [1.0]}, {"a": [0.0], "b": [1.0], "y": [1.0], "x": []})
    assert got.num_tasks == 2
    assert got.mean == pytest.approx(0.25)
    with pytest.raises(ValueError, match="no task in common"):
        paired_difference({"a": [1.0]}, {"b": [1.0]})
