"""The context-parallel part of the GPU suite, on one GPU: what each rank of a group would compute, one after the other.

It shows that the parts are the whole there, too, and how even the placement is in time instead of in counted work.
Nothing is sent: communication is modelled by bench_cp.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from attention_shapes import AttentionCase, AttentionInputs, make_inputs
from measure import interleaved
from torch import Tensor

TOKENS, HEADS, KEY_HEADS, HEAD_DIM = 32768, 32, 8, 128
MASKS = ("document", "tree")
RANKS = (2, 4, 8)
ERROR_LIMIT = 0.02  # of means of unit normal values in bf16, whose step at 1 is 0.008
REPEATS = 5


def context_section(suite: Any) -> None:
    """Outputs of all ranks against the row computed whole, and the slowest rank against the mean of the ranks."""
    for mask in MASKS:
        inputs: AttentionInputs | None = None
        for ranks in RANKS:
            label = f"{mask} T={TOKENS} ranks={ranks}"
            if reason := suite.obstacle():
                suite.skip(f"{label} parts against whole", "max |difference|", reason, limit=ERROR_LIMIT)
                suite.skip(f"{label} slowest / mean rank", "", reason)
                continue
            inputs = inputs or make_inputs(
                AttentionCase(TOKENS, HEADS, KEY_HEADS, HEAD_DIM, mask, "forward", "bfloat16", "cuda")
            )
            error = functools.partial(largest_error, inputs, ranks)
            suite.measure(f"{label} parts against whole", "max |difference|", error, limit=ERROR_LIMIT)
            suite.measure(f"{label} slowest / mean rank", "", functools.partial(imbalance, inputs, ranks))


def largest_error(inputs: AttentionInputs, ranks: int) -> float:
    """max |difference| between the outputs of all ranks and ops.attention of the whole row."""
    from swe_rl.ops.attention_dispatch import attention

    whole = attention(inputs.q, inputs.k, inputs.v, kv_end=inputs.kv_end)
    found = torch.zeros_like(whole)
    for rows, part in rank_parts(inputs, ranks):
        real = rows < len(whole)  # the last ones may be padding
        found[rows[real]] = part()[real].to(found.dtype)
    return float((found - whole).abs().max())


def imbalance(inputs: AttentionInputs, ranks: int) -> float:
    """Median time of the slowest rank over the mean of the ranks' medians."""
    steps = {str(rank): part for rank, (_, part) in enumerate(rank_parts(inputs, ranks))}
    times = interleaved(steps, REPEATS, device=inputs.case.device)
    medians = [found.quantile(0.5) for found in times.values()]
    return max(medians) / (sum(medians) / len(medians))


def rank_parts(inputs: AttentionInputs, ranks: int) -> list[tuple[Tensor, Callable[[], Tensor]]]:
    """(rows, their attention to all keys) of each rank; the whole is padded as the trainer does it."""
    from swe_rl.batching.cp_split import place_rows
    from swe_rl.ops import partial_attention

    placement, kv_end = place_rows(inputs.kv_end, num_ranks=ranks)
    missing = len(kv_end) - len(inputs.q)
    q, k, v = (torch.cat([t, t.new_zeros(missing, *t.shape[1:])]) for t in (inputs.q, inputs.k, inputs.v))
    keys = torch.arange(len(kv_end), device=q.device)
    scale = q.shape[-1] ** -0.5

    def part(rows: Tensor) -> Tensor:
        return partial_attention.forward(q[rows], k, v, partial_attention.visible(rows, keys, kv_end), scale)[0]

    return [(rows, functools.partial(part, rows)) for rows in placement]
