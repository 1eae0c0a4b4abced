"""The five numbers that a softmax over a vocabulary needs of each row, and how partial ones become one.

A row's logits z (scaled by the temperature, soft-capped) are summarised relative to their own maximum, so that common
offsets of any size cost no precision and entropy is never a difference of large numbers:

    column  MAX      m = max z                    (-inf if the part holds no valid column)
            SUM      s = sum exp(z - m)
            WEIGHTED t = sum exp(z - m) (z - m)
            SQUARES  q = sum exp(2 (z - m))
            LABEL    z[label]                     (-inf if the label is in another part)

Parts are shards of the vocabulary over TP ranks, or splits of it inside one kernel; they merge in their given order.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX, SUM, WEIGHTED, SQUARES, LABEL = range(5)
NUM_STATS = 5


def merge(parts: Tensor) -> Tensor:
    """[S, C, 5] statistics of S disjoint parts of the vocabulary -> [C, 5] of the whole, in the dtype of `parts`."""
    if parts.shape[0] == 1:
        return parts[0]
    top = parts[..., MAX].amax(dim=0)
    shift = parts[..., MAX] - top
    present = shift > -torch.inf  # a part without valid columns adds nothing, not 0 * -inf
    shift = torch.where(present, shift, 0.0)
    scale = torch.where(present, shift.exp(), 0.0)
    total = (scale * parts[..., SUM]).sum(dim=0)
    weighted = (scale * (parts[..., WEIGHTED] + shift * parts[..., SUM])).sum(dim=0)
    squares = (scale.square() * parts[..., SQUARES]).sum(dim=0)
    return torch.stack([top, total, weighted, squares, parts[..., LABEL].amax(dim=0)], dim=-1)


def log_sum(stats: Tensor) -> Tensor:
    """log sum exp(z - m), [C] >= 0."""
    return stats[:, SUM].log()


def logprobs(stats: Tensor) -> Tensor:
    """log softmax(z)[label], [C] nats, never above 0."""
    return (stats[:, LABEL] - stats[:, MAX]) - log_sum(stats)


def entropy(stats: Tensor) -> Tensor:
    """Entropy of softmax(z), [C] nats, never below 0: log s - t / s, with t <= 0."""
    return log_sum(stats) - stats[:, WEIGHTED] / stats[:, SUM]


def log_normalizer(stats: Tensor) -> Tensor:
    """log sum exp z, [C]."""
    return stats[:, MAX] + log_sum(stats)


def slopes(stats: Tensor, d_logprob: Tensor, d_entropy: Tensor, d_log_normalizer: Tensor) -> Tensor:
    """What a row kernel needs to write dlogits: [C, 5] = (m, log s, g, c0, c1).

    With logp = (z - m) - log s and p = exp(logp), the gradient of a function of the three outputs is
    dz_j = g [j = label] + p_j (c0 + c1 logp_j), as dlogprob/dz = onehot - p, dentropy/dz = -p (logp + H),
    dlog_normalizer/dz = p.
    """
    constant = d_log_normalizer - d_logprob - d_entropy * entropy(stats)
    return torch.stack([stats[:, MAX], log_sum(stats), d_logprob, constant, -d_entropy], dim=-1)
