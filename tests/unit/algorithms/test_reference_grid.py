"""Advantage x ratio x correction x aggregation: the package against the formulas written out in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from grid_batch import algo_of, make_rows, our_loss
from loss_reference import Case, loss, per_turn_advantages
from torch import Tensor

from swe_rl.config.algo import BOUNDS

ADVANTAGES = BOUNDS.choices["advantage"]
RATIOS = BOUNDS.choices["ratio_rule"]
CORRECTIONS = BOUNDS.choices["correction"]
AGGREGATIONS = BOUNDS.choices["aggregation"]
GRID = list(itertools.product(ADVANTAGES, RATIOS, CORRECTIONS, AGGREGATIONS))
BOUND = 1e-10


def bounds_of(correction: str) -> dict[str, float]:
    """Bounds that pass some rows and refuse others."""
    return {"correction_low": 0.97, "correction_cap": 1.05} if correction == "geometric_mask" else {}


def gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, torch.autograd.grad(value, leaves, allow_unused=True), strict=True)
    ]


def assert_equal(case: Case, **changes: object) -> None:
    rows = make_rows()
    leaves = [row.current for row in rows] + [row.entropy for row in rows]
    got, want = our_loss(rows, algo_of(case, **changes)), loss(rows, case)
    torch.testing.assert_close(got, want, rtol=BOUND, atol=BOUND)
    wanted = gradients(want, leaves)
    for ours, reference in zip(gradients(got, leaves), wanted, strict=True):
        torch.testing.assert_close(ours, reference, rtol=BOUND, atol=BOUND)
    assert any(float(g.abs().max()) > 1e-4 for g in wanted), "a zero gradient proves nothing"


def test_the_grid_is_large_enough() -> None:
    assert len(GRID) >= 300


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_every_combination_equals_the_formulas(advantage: str, ratio: str) -> None:
    for correction, aggregation in itertools.product(CORRECTIONS, AGGREGATIONS):
        case = Case(
            advantage=advantage, ratio=ratio, correction=correction, aggregation=aggregation, **bounds_of(correction)
        )
        assert_equal(case)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_kl_and_entropy_in_the_loss(estimator: str, aggregation: str) -> None:
    assert_equal(Case(aggregation=aggregation, kl=0.1, estimator=estimator, entropy=0.05))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("correction", ["sequence_mask", "geometric_mask"])
def test_rejected_rows_may_leave_the_denominators(correction: str, aggregation: str) -> None:
    case = Case(correction=correction, aggregation=aggregation, **bounds_of(correction))
    rows = make_rows()
    counted = loss(rows, case)
    case.rejected_leave = True
    if aggregation not in ("sum_const",):
        assert abs(float((loss(rows, case) - counted).detach())) > 1e-6, "the case must reject a row"
    assert_equal(case)


@pytest.mark.parametrize("dual", [1.05, 3.0])
def test_dual_clip(dual: float) -> None:
    assert_equal(Case(dual=dual, low=0.05, high=0.05))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.5, 0.5)])
def test_gae(gamma: float, lam: float) -> None:
    assert_equal(Case(advantage="gae", gamma=gamma, lam=lam))


@pytest.mark.parametrize("negative", [0.0, 0.3, 1.5])
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_negative_advantages_weigh_apart(advantage: str, negative: float) -> None:
    assert_equal(Case(advantage=advantage, negative=negative))


@pytest.mark.parametrize("max_tokens", [1, 16, 30])
@pytest.mark.parametrize("ratio", RATIOS)
def test_packing_and_micro_batches_change_nothing(ratio: str, max_tokens: int) -> None:
    case = Case(ratio=ratio, correction="sequence_tis", aggregation="seq_mean")
    rows = make_rows()
    whole, split = our_loss(rows, algo_of(case)), our_loss(rows, algo_of(case), max_tokens=max_tokens)
    torch.testing.assert_close(split, whole, rtol=BOUND, atol=BOUND)


def test_gspo_is_the_clipped_ratio_of_the_sequence_under_a_mean_over_sequences() -> None:
    """(1/B') sum_i max(-A s_i, -A clip(s_i)), s_i differentiated as a whole: what the token form amounts to."""
    case = Case(ratio="gspo", aggregation="seq_mean", low=0.02, high=0.02)
    rows = make_rows()
    leaves = [row.current for row in rows]
    trained = [(row, a[0]) for row, a in zip(rows, per_turn_advantages(rows, case), strict=True) if not row.masked]
    want = torch.zeros((), dtype=torch.float64)
    clipped = 0
    for row, advantage in trained:
        s = (row.current - row.old).mean().exp()
        want = want + torch.maximum(-advantage * s, -advantage * s.clamp(0.98, 1.02)) / len(trained)
        clipped += (advantage > 0 and float(s.detach()) > 1.02) or (advantage < 0 and float(s.detach()) < 0.98)
    got = our_loss(rows, algo_of(case))
    torch.testing.assert_close(got, want, rtol=BOUND, atol=BOUND)
    for ours, reference in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
        torch.testing.assert_close(ours, reference, rtol=BOUND, atol=BOUND)
    assert 0 < clipped < len(trained), "the case must exercise the clip"
