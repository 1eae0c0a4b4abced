"""Worked examples of the per-token maths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from swe_rl.algorithms.losses import policy_loss
from swe_rl.ops.token_loss import (
    clipped_importance,
    clipped_surrogate,
    complete_rules,
    kl_estimate,
    kl_k3,
    log_ratio,
    masked_importance,
    token_loss,
    truncated_importance,
)


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


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (2.9, -1.0, 2.9, 2.9, False),
        (3.5, -1.0, 3.0, 0.0, True),  # the loss of a bad token is bounded by c
        (3.5, 1.0, -1.28, 0.0, True),  # a good one was bounded before
        (0.5, -2.0, 1.6, 0.0, True),
    ],
)
def test_dual_clip(ratio: float, advantage: float, loss: float, slope: float, clipped: bool) -> None:
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    value, _, flag = clipped_surrogate(
        logprobs,
        torch.zeros(1),
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
    )
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert float(logprobs.grad) == pytest.approx(slope)
    assert bool(flag) is clipped


def test_cispo_keeps_the_gradient_of_every_token() -> None:
    """loss = -clip(r) A logprob; slope = -clip(r) A, never 0."""
    logprobs = torch.tensor([math.log(0.5), math.log(0.9), math.log(0.2)], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([math.log(0.25), math.log(0.9), math.log(0.4)], dtype=torch.float64)
    loss, ratio, bounded = clipped_importance(
        logprobs, old, torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64), clip_low=0.3, clip_high=0.1
    )
    loss.sum().backward()
    assert ratio.tolist() == pytest.approx([2.0, 1.0, 0.5])
    assert bounded.tolist() == [True, False, True]
    assert logprobs.grad.tolist() == pytest.approx([-1.1, -2.0, 0.7])
    assert loss.tolist() == pytest.approx([-1.1 * math.log(0.5), -2 * math.log(0.9), 0.7 * math.log(0.2)])


def test_masked_importance_drops_what_lies_outside() -> None:
    old = torch.tensor([math.log(0.5), math.log(0.2), math.log(0.6), math.log(0.4)], dtype=torch.float64)
    engine = torch.tensor([math.log(0.5), math.log(0.5), math.log(0.2), math.log(0.5)], dtype=torch.float64)
    assert masked_importance(old, engine, low=0.5, cap=2.0).tolist() == pytest.approx([1.0, 0.0, 0.0, 0.8])


def test_corrections_and_coefficients_touch_the_policy_term_only() -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64)
    terms = {"entropy": torch.tensor([2.0]), "log_normalizer": torch.tensor([3.0]), "advantages": torch.tensor([1.5])}
    others = {"ref_logprobs": torch.tensor([-1.5]), "kl_coeff": 0.1, "entropy_coeff": 0.01, "z_loss_coeff": 0.001}
    extra = 0.1 * (math.exp(-0.5) + 0.5 - 1) - 0.02 + 0.009
    plain, _ = token_loss(logprobs, **terms, **others, ratio_rule="on_policy")
    assert plain.item() == pytest.approx(-1.5 + extra)
    corrected, _ = token_loss(
        logprobs,
        **terms,
        **others,
        ratio_rule="on_policy",
        sequence_coeff=torch.tensor([0.5]),
        rollout_logprobs=torch.tensor([-1.0 - math.log(1.5)]),
        correction="tis",
    )
    assert corrected.item() == pytest.approx(-1.5 * 0.5 * 1.5 + extra)


def test_constants_get_no_gradient() -> None:
    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "sequence_coeff")
    constants = {name: torch.rand(3, requires_grad=True) for name in names}
    logprobs = torch.rand(3, requires_grad=True)
    loss, _ = token_loss(
        logprobs, entropy=torch.rand(3), advantages=torch.ones(3), correction="mask", kl_coeff=0.1, **constants
    )
    loss.sum().backward()
    assert logprobs.grad is not None
    assert all(constant.grad is None for constant in constants.values())


TENSORS = {"old_logprobs": "has_old", "rollout_logprobs": "has_rollout", "ref_logprobs": "has_ref"}


@pytest.mark.parametrize(
    ("rules", "given", "words"),
    [
        ({"ratio_rule": "gspo"}, (), "ratio_rule='gspo' is unknown"),
        ({"correction": "mis"}, (), "correction='mis' is unknown"),
        ({"clip_hi": 0.1}, (), "clip_hi is no rule of the loss"),
        ({"clip_low": 1.5}, (), "clip_low=1.5"),
        ({"clip_low": -0.1}, (), "clip_low=-0.1"),
        ({"clip_high": -0.1}, (), "clip_high=-0.1"),
        ({"clip_low": math.nan}, (), "clip_low=nan must be a finite number"),
        ({"entropy_coeff": math.inf}, (), "entropy_coeff=inf"),
        ({"kl_coeff": "0.1"}, ("ref_logprobs",), "kl_coeff='0.1'"),
        ({"z_loss_coeff": torch.tensor(0.1)}, (), "z_loss_coeff=tensor"),
        ({"dual_clip": 0.9}, (), "dual_clip=0.9 must be above 1"),
        ({"dual_clip": 3.0, "ratio_rule": "cispo"}, (), "needs ratio_rule='ppo'"),
        ({"correction": "tis"}, (), "correction='tis' needs rollout_logprobs"),
        ({"correction": "tis", "correction_cap": 0.0}, ("rollout_logprobs",), "correction_cap=0.0"),
        ({"correction": "mask", "correction_low": 3.0}, ("rollout_logprobs",), "correction_low=3.0"),
        ({"correction": "tis", "ratio_rule": "cross_entropy"}, ("rollout_logprobs",), "takes no correction"),
        ({"ratio_rule": "on_policy"}, ("old_logprobs",), "takes no old_logprobs"),
        ({"kl_coeff": 0.1}, (), "kl_coeff=0.1 needs ref_logprobs"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules: dict[str, Any], given: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        complete_rules(rules, **{flag: name in given for name, flag in TENSORS.items()})
    assert "\n" not in str(error.value)
    ones = torch.ones(2)
    with pytest.raises(ValueError, match=words):
        token_loss(ones, entropy=ones, advantages=ones, **dict.fromkeys(given, ones), **rules)


def test_z_loss_without_the_normalizer_is_refused() -> None:
    with pytest.raises(ValueError, match="z_loss_coeff needs log_normalizer"):
        token_loss(torch.ones(2), entropy=torch.ones(2), advantages=torch.ones(2), z_loss_coeff=0.1)


def test_expected_gradients_of_the_kl_estimators() -> None:
    """Exact expectations over five outcomes: in the loss k1 pulls nowhere, k2 as KL(policy || ref), k3 as
    KL(ref || policy); in the reward, times the score, k1 pulls as KL(policy || ref) and the others do not."""
    logits = torch.tensor([0.3, -1.2, 0.8, 0.0, 1.5], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.4, 0.1], dtype=torch.float64), dim=-1)
    logprobs = torch.log_softmax(logits, dim=-1)
    chance = logprobs.detach().exp()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    reverse = gradient((logprobs.exp() * (logprobs - ref)).sum())
    forward = gradient((ref.exp() * (ref - logprobs)).sum())
    in_loss = {k: gradient((chance * kl_estimate(logprobs, ref, k)).sum()) for k in ("k1", "k2", "k3")}
    in_reward = {k: gradient((chance * logprobs * kl_estimate(logprobs, ref, k).detach()).sum()) for k in in_loss}
    torch.testing.assert_close(in_loss["k1"], torch.zeros_like(logits), rtol=0, atol=1e-12)
    torch.testing.assert_close(in_loss["k2"], reverse)
    torch.testing.assert_close(in_loss["k3"], forward)
    torch.testing.assert_close(in_reward["k1"], reverse)
    for other in ("k2", "k3"):
        assert float((in_reward[other] - reverse).abs().max()) > 0.05
