"""Attention as its definition says it, with the whole [T, T] matrix: what every other implementation is compared to."""

from __future__ import annotations

import torch
from torch import Tensor

from swe_rl.ops.attention_mask import dense_mask


def attention(q: Tensor, k: Tensor, v: Tensor, kv_end: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, D] in q's dtype, lse [Hq, T]): out = softmax(scale q k' under the mask) v, computed in fp32 (fp64).

    lse is the logarithm of the sum of exponentials, natural. A row that sees nothing has out 0 and lse -inf.
    Differentiable by autograd, also twice.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    shared = q.shape[1] // k.shape[1]
    mask = dense_mask(kv_end)
    blind, unseen = ~mask.any(dim=1)[:, None], ~mask.any(dim=0)[:, None]
    # What padding holds, and its gradient, may be NaN, and 0 times NaN is NaN.
    query = q.to(wide).transpose(0, 1).masked_fill(blind, 0.0)
    key, value = (t.to(wide).transpose(0, 1).masked_fill(unseen, 0.0).repeat_interleave(shared, dim=0) for t in (k, v))
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # Rows without a visible key would be exp(-inf + inf), and their gradient NaN.
    weights = torch.exp((scores - lse.masked_fill(blind[:, 0], 0.0)[..., None]).masked_fill(~mask, -torch.inf))
    return (weights @ value).masked_fill(blind, 0.0).transpose(0, 1).to(q.dtype), lse
