"""Worked examples of the per-token maths."""

from __future__ import annotations

import math

import pytest
import torch

from swe_rl.algorithms.losses import policy_loss
from swe_rl.ops.token_loss import clipped_surrogate, kl_k3, log_ratio, token_loss, truncated_importance


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.2, 1.0, -1.2, -1.2, False),
        (1.5, 1.0, -1.28, 0.0, True),  # clip-high
        (0.5, 1.0, -0.5, -0.5, False),  # a good token that became rare is not held back
        (0.5, -1.0, 0.8, 0.0, True),  # clip-low
        (1.5, -1.0, 1.5, 1.5, False),  # a bad token that became frequent is not held back
        (3.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_asymmetric_clip(ratio: float, advantage: float, loss: float, slope: float, clipped: bool) -> None:
    """`slope` is d loss / d logprob = -A r where the clip does not act."""
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    value, seen, flag = clipped_surrogate(
        logprobs, torch.zeros(1), torch.tensor([advantage], dtype=torch.float64), clip_low=0.2, clip_high=0.28
    )
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert seen.item() == pytest.approx(ratio)
    assert float(logprobs.grad) == pytest.approx(slope)
    assert bool(flag) is clipped


def test_log_ratio_is_clamped_so_that_nothing_overflows() -> None:
    far = torch.tensor([500.0, -500.0, 3.0])
    assert log_ratio(far, torch.zeros(3)).tolist() == [20.0, -20.0, 3.0]
    loss, _, _ = clipped_surrogate(far, torch.zeros(3), torch.tensor([-1.0, 1.0, 1.0]), clip_low=0.2, clip_high=0.2)
    assert torch.isfinite(loss).all()


def test_truncated_importance_is_one_sided_and_constant() -> None:
    old = torch.tensor([math.log(0.5), math.log(0.2), math.log(0.6)], requires_grad=True)
    weight = truncated_importance(old, torch.log(torch.tensor([0.5, 0.4, 0.1])), cap=2.0)
    assert weight.tolist() == pytest.approx([1.0, 0.5, 2.0])
    assert not weight.requires_grad


def test_k3_is_zero_at_equality_and_positive_elsewhere() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    value = kl_k3(logprobs, torch.tensor([-1.0, -2.0, 0.0], dtype=torch.float64))
    assert value.tolist() == pytest.approx([0.0, math.exp(-1), math.e - 2])
    value.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1 - math.exp(-1), 1 - math.e])


def test_cross_entropy_ignores_advantages() -> None:
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    loss, stats = token_loss(
        logprobs, entropy=torch.zeros(2), advantages=torch.tensor([math.nan, -3.0]), ratio_rule="cross_entropy"
    )
    assert loss.tolist() == [0.5, 2.0]
    assert stats["ratio"].tolist() == [1.0, 1.0]


def test_policy_loss_weighs_and_selects() -> None:
    """0.5 * max(-1.1, ...) + 0.25 * 0.8; the masked slot holds NaN."""
    logprobs = torch.tensor([math.log(1.1), math.nan, math.log(0.4)], dtype=torch.float64, requires_grad=True)
    loss = policy_loss(
        logprobs,
        torch.tensor([0.0, math.nan, 0.0]),
        torch.tensor([1.0, math.nan, -1.0]),
        torch.tensor([True, False, True]),
        token_weights=torch.tensor([0.5, math.nan, 0.25]),
        clip_low=0.2,
        clip_high=0.28,
    )
    assert loss.item() == pytest.approx(0.5 * -1.1 + 0.25 * 0.8)
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.55, 0.0, 0.0])
