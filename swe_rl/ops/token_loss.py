"""THE per-token loss maths. Every implementation of the head ends here; none of them repeats a formula.

Letters: T trained tokens (rows already selected by the loss mask). All functions are pure and keep the dtype they get.
Sources: PPO clip (arXiv:1707.06347) with asymmetric bounds (DAPO, arXiv:2503.14476), truncated importance sampling
of the trainer/engine mismatch (token level), k3 estimator of KL(policy || reference).
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

RATIO_RULES = ("ppo", "on_policy", "cross_entropy")
CORRECTIONS = ("none", "tis")
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: beyond it a ratio means nothing and could overflow


class LossRules(TypedDict, total=False):
    """Keyword arguments of token_loss that are numbers or names; its signature has the defaults."""

    clip_low: float
    clip_high: float
    ratio_rule: str  # one of RATIO_RULES
    correction: str  # one of CORRECTIONS
    correction_cap: float
    kl_coeff: float
    entropy_coeff: float


class LossTerms(LossRules, total=False):
    """What linear_policy_loss takes beside its own arguments: the rules, and [T] tensors of all rows."""

    old_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    sequence_coeff: Tensor | None
    ref_logprobs: Tensor | None


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(p/q) of two [T] logprobs, clamped to +-20 nats. Outside the clamp the gradient is zero."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - old_logprobs).

    All inputs [T]. Returns (loss [T], ratio [T], clipped [T] bool: the tokens whose gradient the clip removed).
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    too_high = (advantages > 0) & (ratio > 1.0 + clip_high)
    too_low = (advantages < 0) & (ratio < 1.0 - clip_low)
    return loss, ratio, too_high | too_low


def truncated_importance(old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float) -> Tensor:
    """min(p_trainer_old / p_engine, cap), [T], a constant: corrects tokens that the engine sampled off the trainer."""
    return log_ratio(old_logprobs.detach(), rollout_logprobs.detach()).exp().clamp(max=cap)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref - logprobs: an unbiased, non-negative estimate of KL(policy || ref), [T] nats."""
    delta = log_ratio(ref_logprobs.detach(), logprobs)
    return delta.exp() - delta - 1.0


def check_rules(
    ratio_rule: str, correction: str, *, has_rollout: bool, has_ref: bool, has_old: bool, kl_coeff: float
) -> None:
    """Refuses unknown names and combinations in which a knob would have no effect. Raises ValueError."""
    if ratio_rule not in RATIO_RULES:
        raise ValueError(f"ratio_rule={ratio_rule!r} is unknown: use one of {', '.join(RATIO_RULES)}")
    if correction not in CORRECTIONS:
        raise ValueError(f"correction={correction!r} is unknown: use one of {', '.join(CORRECTIONS)}")
    if correction == "tis" and not has_rollout:
        raise ValueError("correction='tis' needs rollout_logprobs")
    if correction != "none" and ratio_rule == "cross_entropy":
        raise ValueError("ratio_rule='cross_entropy' takes no correction: its samples are not weighted by a ratio")
    if ratio_rule == "on_policy" and has_old:
        raise ValueError("ratio_rule='on_policy' takes no old_logprobs: use 'ppo', or leave them out")
    if kl_coeff and not has_ref:
        raise ValueError(f"kl_coeff={kl_coeff} needs ref_logprobs")


def token_loss(
    logprobs: Tensor,
    *,
    entropy: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sequence_coeff: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ratio_rule: str = "ppo",
    correction: str = "none",
    correction_cap: float = 2.0,
    kl_coeff: float = 0.0,
    entropy_coeff: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each trained token, to be weighted and summed by the caller.

    All tensors [T]; `logprobs` and `entropy` carry the gradient, the others are constants.
    ratio_rule "ppo": clipped surrogate; without `old_logprobs` the old policy is the current one (ratio exactly 1),
    which is what one optimiser step per batch amounts to. "on_policy": the same without a clip. "cross_entropy":
    -logprobs, advantages unused. `sequence_coeff` and the correction multiply the policy term only.
    Returns (loss [T], detached stats: logprobs, entropy, ratio, clipped). Raises ValueError for rules that do not fit.
    """
    check_rules(
        ratio_rule,
        correction,
        has_rollout=rollout_logprobs is not None,
        has_ref=ref_logprobs is not None,
        has_old=old_logprobs is not None,
        kl_coeff=kl_coeff,
    )
    old = logprobs.detach() if old_logprobs is None else old_logprobs.detach().to(logprobs.dtype)
    if ratio_rule == "ppo":
        loss, ratio, clipped = clipped_surrogate(logprobs, old, advantages, clip_low=clip_low, clip_high=clip_high)
    elif ratio_rule == "on_policy":
        ratio = log_ratio(logprobs, old).exp()
        loss, clipped = -advantages * ratio, torch.zeros_like(ratio, dtype=torch.bool)
    else:
        ratio, clipped = torch.ones_like(logprobs), torch.zeros_like(logprobs, dtype=torch.bool)
        loss = -logprobs
    if correction == "tis":
        assert rollout_logprobs is not None  # checked above
        loss = loss * truncated_importance(old, rollout_logprobs, cap=correction_cap)
    if sequence_coeff is not None:
        loss = loss * sequence_coeff.detach()
    if kl_coeff:
        assert ref_logprobs is not None  # checked above
        loss = loss + kl_coeff * kl_k3(logprobs, ref_logprobs)
    if entropy_coeff:
        loss = loss - entropy_coeff * entropy
    stats = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "ratio": ratio.detach(), "clipped": clipped}
    return loss, stats
