"""THE per-token loss maths. Every implementation of the head ends here; none of them repeats a formula.

Letters: T trained tokens (rows already selected by the loss mask). All functions are pure and keep the dtype they get.
Sources: PPO clip (arXiv:1707.06347) with asymmetric bounds (DAPO, arXiv:2503.14476) and dual clip (arXiv:1912.09729),
CISPO (arXiv:2506.13585), truncated importance sampling and masking of the trainer/engine mismatch (token level),
k1, k2 and k3 estimators of KL(policy || reference) (Schulman 2020), z-loss (PaLM, arXiv:2204.02311). What belongs to
whole sequences comes from algorithms.sequences: corrections as `sequence_coeff`, GSPO (arXiv:2507.18071) as the
`old_logprobs` that make every token's ratio that of its sequence.
"""

from __future__ import annotations

import math
from typing import TypedDict, Unpack

import torch
from torch import Tensor

RATIO_RULES = ("ppo", "on_policy", "cispo", "cross_entropy")
CORRECTIONS = ("none", "tis", "mask")
KL_ESTIMATORS = ("k1", "k2", "k3")
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: beyond it a ratio means nothing and could overflow


class LossRules(TypedDict, total=False):
    """Keyword arguments of token_loss that are numbers or names; DEFAULTS has what is left out."""

    clip_low: float
    clip_high: float
    dual_clip: float
    ratio_rule: str  # one of RATIO_RULES
    correction: str  # one of CORRECTIONS
    correction_low: float
    correction_cap: float
    kl_coeff: float
    kl_estimator: str  # one of KL_ESTIMATORS
    entropy_coeff: float
    z_loss_coeff: float


DEFAULTS: LossRules = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 0.0,
    "ratio_rule": "ppo",
    "correction": "none",
    "correction_low": 0.5,
    "correction_cap": 2.0,
    "kl_coeff": 0.0,
    "kl_estimator": "k3",
    "entropy_coeff": 0.0,
    "z_loss_coeff": 0.0,
}


class LossTerms(LossRules, total=False):
    """What linear_policy_loss takes beside its own arguments: the rules, and [T] tensors of all rows."""

    old_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    sequence_coeff: Tensor | None
    ref_logprobs: Tensor | None


COLUMNS = ("old_logprobs", "rollout_logprobs", "sequence_coeff", "ref_logprobs")  # the tensors of LossTerms


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(p/q) of two [T] logprobs, clamped to +-20 nats. Outside the clamp the gradient is zero."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - old_logprobs).

    dual_clip = c > 1 bounds the loss of A < 0 by -c A, so that one huge ratio cannot rule a step; 0 is off.
    All inputs [T]. Returns (loss [T], ratio [T], clipped [T] bool: the tokens whose gradient the clip removed).
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    clipped = (advantages > 0) & (ratio > 1.0 + clip_high) | (advantages < 0) & (ratio < 1.0 - clip_low)
    if dual_clip:
        huge = (advantages < 0) & (ratio > dual_clip)
        loss = torch.where(huge, -advantages * dual_clip, loss)
        clipped = clipped | huge
    return loss, ratio, clipped


def clipped_importance(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """CISPO: -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs; every token keeps a gradient.

    All inputs [T]. Returns (loss [T], ratio [T], clipped [T] bool: the tokens whose weight was bounded).
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    weight = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, ratio, weight != ratio.detach()


def truncated_importance(old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float) -> Tensor:
    """min(p_trainer_old / p_engine, cap), [T], a constant: corrects tokens that the engine sampled off the trainer."""
    return log_ratio(old_logprobs.detach(), rollout_logprobs.detach()).exp().clamp(max=cap)


def masked_importance(old_logprobs: Tensor, rollout_logprobs: Tensor, *, low: float, cap: float) -> Tensor:
    """p_trainer_old / p_engine where it lies in [low, cap], else 0: [T], a constant (IcePop, token level)."""
    ratio = log_ratio(old_logprobs.detach(), rollout_logprobs.detach()).exp()
    return torch.where((ratio >= low) & (ratio <= cap), ratio, torch.zeros_like(ratio))


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref - logprobs: an unbiased, non-negative estimate of KL(policy || ref), [T] nats."""
    delta = log_ratio(ref_logprobs.detach(), logprobs)
    return delta.exp() - delta - 1.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """KL(policy || ref) of each token, [T] nats, of tokens that the policy sampled, with d = logprobs - ref_logprobs.

    k1: d, unbiased, but its gradient is zero on average; k2: d^2 / 2, biased, its gradient is that of the KL;
    k3: exp(-d) + d - 1, unbiased and never negative, its gradient is that of KL(ref || policy), on average. As a part
    of the reward k1 has the gradient of the KL, the others have not. Raises ValueError for another kind.
    """
    if kind == "k3":
        return kl_k3(logprobs, ref_logprobs)
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator={kind!r} is unknown: use one of {', '.join(KL_ESTIMATORS)}")
    delta = log_ratio(logprobs, ref_logprobs.detach())
    return delta if kind == "k1" else 0.5 * delta.square()


def complete_rules(rules: LossRules, *, has_old: bool, has_rollout: bool, has_ref: bool) -> LossRules:
    """The rules with DEFAULTS for what is left out; the flags say which [T] tensors are given beside them.

    Raises ValueError for unknown names and for combinations in which a rule would have no effect.
    """
    if unknown := set(rules) - set(DEFAULTS):
        raise ValueError(f"{min(unknown)} is no rule of the loss: use one of {', '.join(DEFAULTS)}")
    full: LossRules = {**DEFAULTS, **rules}
    for name, value in full.items():
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if name not in ("ratio_rule", "correction", "kl_estimator") and not is_number:
            raise ValueError(f"{name}={value!r} must be a finite number")
    ratio_rule, correction = full["ratio_rule"], full["correction"]
    if ratio_rule not in RATIO_RULES:
        raise ValueError(f"ratio_rule={ratio_rule!r} is unknown: use one of {', '.join(RATIO_RULES)}")
    if correction not in CORRECTIONS:
        raise ValueError(f"correction={correction!r} is unknown: use one of {', '.join(CORRECTIONS)}")
    if full["kl_estimator"] not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator={full['kl_estimator']!r} is unknown: use one of {', '.join(KL_ESTIMATORS)}")
    if not (0 <= full["clip_low"] <= 1 and full["clip_high"] >= 0):
        raise ValueError(f"clip_low={full['clip_low']} must be in [0, 1] and clip_high={full['clip_high']} at least 0")
    if full["dual_clip"] and not (full["dual_clip"] > 1 and ratio_rule == "ppo"):
        raise ValueError(f"dual_clip={full['dual_clip']} must be above 1 (0 is off) and needs ratio_rule='ppo'")
    if correction != "none" and not has_rollout:
        raise ValueError(f"correction={correction!r} needs rollout_logprobs")
    if correction != "none" and ratio_rule == "cross_entropy":
        raise ValueError("ratio_rule='cross_entropy' takes no correction: its samples are not weighted by a ratio")
    if correction == "tis" and not full["correction_cap"] > 0:
        raise ValueError(f"correction_cap={full['correction_cap']} must be above 0")
    if correction == "mask" and not 0 <= full["correction_low"] <= full["correction_cap"]:
        raise ValueError(
            f"correction_low={full['correction_low']} must lie between 0 and correction_cap={full['correction_cap']}"
        )
    if ratio_rule == "on_policy" and has_old:
        raise ValueError("ratio_rule='on_policy' takes no old_logprobs: use 'ppo', or leave them out")
    if full["kl_coeff"] and not has_ref:
        raise ValueError(f"kl_coeff={full['kl_coeff']} needs ref_logprobs")
    return full


def policy_term(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, rules: LossRules
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, ratio, clipped), each [T], of the ratio rule alone; `rules` complete."""
    old = logprobs.detach() if old_logprobs is None else old_logprobs.detach().to(logprobs.dtype)
    bounds = {"clip_low": rules["clip_low"], "clip_high": rules["clip_high"]}
    if rules["ratio_rule"] == "ppo":
        return clipped_surrogate(logprobs, old, advantages, **bounds, dual_clip=rules["dual_clip"])
    if rules["ratio_rule"] == "cispo":
        return clipped_importance(logprobs, old, advantages, **bounds)
    nothing = torch.zeros_like(logprobs, dtype=torch.bool)
    if rules["ratio_rule"] == "on_policy":
        ratio = log_ratio(logprobs, old).exp()
        return -advantages * ratio, ratio, nothing
    return -logprobs, torch.ones_like(logprobs), nothing


def mismatch_weight(old_logprobs: Tensor, rollout_logprobs: Tensor, rules: LossRules) -> Tensor:
    """[T] constant that corrects the policy term for an engine that sampled off the trainer's old policy."""
    if rules["correction"] == "tis":
        return truncated_importance(old_logprobs, rollout_logprobs, cap=rules["correction_cap"])
    low, cap = rules["correction_low"], rules["correction_cap"]
    return masked_importance(old_logprobs, rollout_logprobs, low=low, cap=cap)


def token_loss(
    logprobs: Tensor,
    *,
    entropy: Tensor,
    advantages: Tensor,
    log_normalizer: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sequence_coeff: Tensor | None = None,
    **rules: Unpack[LossRules],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each trained token, to be weighted and summed by the caller.

    All tensors [T]; `logprobs`, `entropy` and `log_normalizer` (log sum exp of the logits; needed for z_loss_coeff)
    carry the gradient, the others are constants.
    ratio_rule "ppo": clipped surrogate; without `old_logprobs` the old policy is the current one (ratio exactly 1),
    which is what one optimiser step per batch amounts to. "on_policy": the same without a clip. "cispo": bounded
    weights, no token loses its gradient. "cross_entropy": -logprobs, advantages unused. correction "tis" multiplies by
    the truncated ratio of trainer to engine, "mask" also drops tokens outside [correction_low, correction_cap].
    `sequence_coeff` and the correction multiply the policy term only. Rules left out are DEFAULTS.
    Returns (loss [T], detached stats: logprobs, entropy, ratio, clipped). Raises ValueError for rules that do not fit.
    """
    flags = {"has_old": old_logprobs is not None, "has_rollout": rollout_logprobs is not None}
    full = complete_rules(rules, has_ref=ref_logprobs is not None, **flags)
    loss, ratio, clipped = policy_term(logprobs, old_logprobs, advantages, full)
    if full["correction"] != "none":
        assert rollout_logprobs is not None  # complete_rules
        loss = loss * mismatch_weight(logprobs if old_logprobs is None else old_logprobs, rollout_logprobs, full)
    if sequence_coeff is not None:
        loss = loss * sequence_coeff.detach()
    if full["kl_coeff"]:
        assert ref_logprobs is not None  # complete_rules
        loss = loss + full["kl_coeff"] * kl_estimate(logprobs, ref_logprobs, full["kl_estimator"])
    if full["entropy_coeff"]:
        loss = loss - full["entropy_coeff"] * entropy
    if full["z_loss_coeff"]:
        if log_normalizer is None:
            raise ValueError("z_loss_coeff needs log_normalizer")
        loss = loss + full["z_loss_coeff"] * log_normalizer.square()
    stats = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "ratio": ratio.detach(), "clipped": clipped}
    return loss, stats
