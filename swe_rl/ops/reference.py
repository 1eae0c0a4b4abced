"""The head in plain torch: the twin that every kernel is compared with, and what runs where no kernel is built.

Letters: T tokens, H hidden, V vocabulary, C rows of a chunk. Sums are in fp32 (fp64 for fp64 inputs); at most
[C, V] logits exist at a time, in the forward pass and, recomputed, in the backward pass.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swe_rl.ops import token_loss

CHUNK_ELEMENTS = 1 << 24  # logits of one chunk: 64 MiB in fp32
MIN_CHUNK_ROWS = 16


def chunk_rows(vocab_size: int) -> int:
    """Rows of one chunk, so that chunk x vocabulary stays within CHUNK_ELEMENTS."""
    return max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // vocab_size)


def _log_softmax(hidden: Tensor, weight: Tensor, inv_temperature: Tensor) -> Tensor:
    """[C, V] log-probabilities; the temperature is applied in full precision, after the product."""
    return torch.log_softmax((hidden @ weight.T) * inv_temperature[:, None], dim=-1)


class _LinearLogprob(torch.autograd.Function):
    """(logprobs [T], entropy [T]) of softmax(hidden @ weight.T / temperature), with chunked recompute."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, inv_temperature: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        dtype = inv_temperature.dtype
        full_weight = weight.to(dtype)
        logprobs, entropy = inv_temperature.new_empty(len(labels)), inv_temperature.new_empty(len(labels))
        for start in range(0, len(labels), rows):
            part = slice(start, start + rows)
            logp = _log_softmax(hidden[part].to(dtype), full_weight, inv_temperature[part])
            logprobs[part] = logp.gather(1, labels[part, None])[:, 0]
            entropy[part] = -(logp.exp() * logp).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, labels, inv_temperature, entropy)
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, inv_temperature, entropy = ctx.saved_tensors
        dtype = inv_temperature.dtype
        full_weight = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(full_weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(labels), ctx.rows):
            part = slice(start, start + ctx.rows)
            rows = hidden[part].to(dtype)
            logp = _log_softmax(rows, full_weight, inv_temperature[part])
            dlogits = _grad_logits(
                logp,
                labels[part],
                entropy[part],
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else grad_entropy[part],
            )
            dlogits.mul_(inv_temperature[part, None])
            if grad_hidden is not None:
                grad_hidden[part] = (dlogits @ full_weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(dlogits.T, rows)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _grad_logits(
    logp: Tensor, labels: Tensor, entropy: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """g_l (onehot - p) - g_H p (log p + H), [C, V], before the factor 1/temperature."""
    prob = logp.exp()
    dlogits = torch.zeros_like(prob)
    if grad_logprobs is not None:
        dlogits.addcmul_(prob, grad_logprobs[:, None], value=-1.0)
        dlogits.scatter_add_(1, labels[:, None], grad_logprobs[:, None])
    if grad_entropy is not None:
        dlogits.sub_(grad_entropy[:, None] * prob * (logp + entropy[:, None]))
    return dlogits


def linear_logprob(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[label] and the entropy in nats of each row.

    hidden [T, H] and weight [V, H] of one float dtype, labels [T] i64, temperature > 0 a number or [T].
    Returns (logprobs [T], entropy [T]) in fp32, in fp64 for fp64 inputs; both differentiable in hidden and weight.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if isinstance(temperature, Tensor):
        inv_temperature = temperature.to(dtype).reciprocal().expand(len(labels))
    else:
        inv_temperature = torch.full((len(labels),), 1.0 / temperature, dtype=dtype, device=hidden.device)
    result: tuple[Tensor, Tensor] = _LinearLogprob.apply(
        hidden, weight, labels, inv_temperature, chunk_rows(weight.shape[0])
    )
    return result


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    temperature: float | Tensor = 1.0,
    **terms: Unpack[token_loss.LossTerms],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over trained t of token_weights[t] * loss[t]; arguments as in linear_head.linear_policy_loss.

    Rows are selected by `loss_mask` before anything else, so that whatever stands in masked slots is never read
    and only trained rows meet the [V, H] weight. Without trained rows the loss is 0 and still differentiable.
    """
    rows = loss_mask.nonzero(as_tuple=True)[0]
    logprobs, entropy = linear_logprob(
        hidden.index_select(0, rows),
        weight,
        labels.index_select(0, rows),
        temperature=temperature.index_select(0, rows) if isinstance(temperature, Tensor) else temperature,
    )
    chosen: Any = {n: v.index_select(0, rows) if isinstance(v, Tensor) else v for n, v in terms.items()}
    losses, stats = token_loss.token_loss(
        logprobs, entropy=entropy, advantages=advantages.index_select(0, rows), **chosen
    )
    return (losses * token_weights.index_select(0, rows)).sum(), stats
