"""AUC against counting pairs, calibration error against the definition by hand."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from swe_rl.evaluation.calibration import auc, brier_score, expected_calibration_error, reliability, roc_curve


@pytest.mark.parametrize("size", [2, 7, 33, 101])
def test_auc_is_the_share_of_pairs_in_the_right_order(size: int) -> None:
    rng = random.Random(size)
    scores = [rng.randrange(8) / 8 for _ in range(size)]  # many ties
    labels = [True, False, *(rng.random() < 0.4 for _ in range(size - 2))]
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for (a, x), (b, y) in itertools.product(zip(scores, labels, strict=True), repeat=2)
        if x and not y
    ]
    assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def test_roc_curve_takes_equal_scores_in_one_step() -> None:
    assert roc_curve([0.9, 0.5, 0.5, 0.1], [True, True, False, False]) == [(0, 0), (0, 0.5), (0.5, 1), (1, 1)]
    assert roc_curve([0.5, 0.5], [True, False]) == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match="true and false"):
        roc_curve([0.5], [True])
    assert math.isnan(auc([0.5, 0.7], [True, True]))


def test_calibration_error_by_hand() -> None:
    scores, labels = [0.05, 0.1, 0.62, 0.65, 1.0], [False, True, True, False, True]
    # (0, 0.1]: mean 0.075, share 0.5; (0.6, 0.7]: 0.635, 0.5; (0.9, 1]: 1, 1
    assert expected_calibration_error(scores, labels) == pytest.approx((2 * 0.425 + 2 * 0.135) / 5)
    bins = reliability(scores, labels)
    assert [part.count for part in bins] == [2, 0, 0, 0, 0, 0, 2, 0, 0, 1]
    assert math.isnan(bins[1].mean_score)
    assert brier_score(scores, labels) == pytest.approx(sum((s - t) ** 2 for s, t in zip(scores, labels)) / 5)  # noqa: B905


def test_the_first_bin_has_its_lower_end() -> None:
    assert reliability([0.0], [True], num_bins=3)[0].count == 1
    assert reliability([1.0], [True], num_bins=3)[2].count == 1


@pytest.mark.parametrize(("scores", "labels"), [([math.nan], [True]), ([0.5], [])])
def test_bad_input_is_refused(scores: list[float], labels: list[bool]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # either of two messages
        auc(scores, labels)
    with pytest.raises(ValueError, match="between 0 and 1"):
        reliability([1.5], [True])
