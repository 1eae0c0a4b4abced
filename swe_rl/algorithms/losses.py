"""The policy loss on given logprobs; the maths itself is ops.token_loss, re-exported here."""

from __future__ import annotations

import torch
from torch import Tensor

from swe_rl.ops.token_loss import clipped_surrogate, kl_k3, log_ratio, token_loss, truncated_importance

__all__ = ["clipped_surrogate", "kl_k3", "log_ratio", "policy_loss", "token_loss", "truncated_importance"]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    token_weights: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Sum over trained t of token_weights[t] * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), a scalar.

    All tensors [T]; loss_mask bool. Masked slots are selected away: they may hold NaN.
    """
    chosen = [torch.masked_select(t, loss_mask) for t in (logprobs, old_logprobs, advantages, token_weights)]
    loss, _, _ = clipped_surrogate(chosen[0], chosen[1].detach(), chosen[2], clip_low=clip_low, clip_high=clip_high)
    return (loss * chosen[3]).sum()
