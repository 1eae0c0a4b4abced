"""The head in plain torch: the definition of correct, which every other implementation is compared with.

Letters: T tokens, M trained tokens, H hidden, V vocabulary. Full [T, V] or [M, V] logits, autograd, nothing clever;
fp32 (fp64 for fp64 inputs) after the cast of the inputs. Also what runs where neither compiler nor Triton is present.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swe_rl.ops.token_loss import token_loss


def logits(hidden: Tensor, weight: Tensor, *, temperature: Tensor, softcap: float = 0.0, vocab_size: int) -> Tensor:
    """[T, vocab_size] logits, soft-capped, then divided by temperature [T]; later rows of `weight` are padding."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        raw = hidden.to(dtype) @ weight[:vocab_size].to(dtype).T
    capped = softcap * torch.tanh(raw / softcap) if softcap else raw
    return capped / temperature.to(dtype)[:, None]


def outputs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: Tensor, softcap: float = 0.0, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, entropy, log_normalizer), each [T] and differentiable."""
    scaled = logits(hidden, weight, temperature=temperature, softcap=softcap, vocab_size=vocab_size)
    logp = torch.log_softmax(scaled, dim=-1)
    chosen = logp.gather(1, labels[:, None])[:, 0]
    return chosen, -(logp.exp() * logp).sum(dim=-1), torch.logsumexp(scaled, dim=-1)


def policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    token_weights: Tensor,
    temperature: Tensor,
    softcap: float = 0.0,
    vocab_size: int,
    **terms: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over rows of token_weights * token_loss(...), and its stats. All rows are trained ones."""
    logprobs, entropy, log_normalizer = outputs(
        hidden, weight, labels, temperature=temperature, softcap=softcap, vocab_size=vocab_size
    )
    losses, stats = token_loss(logprobs, entropy=entropy, log_normalizer=log_normalizer, **terms)
    return (losses * token_weights).sum(), stats
