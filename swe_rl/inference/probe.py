"""Which shapes leave the bits of a row alone on this machine.

The promise "an episode alone and among fifteen others: same ids, bit-equal logprobs" rests on kernels that nobody
specified. Found on an x86 CPU with torch 2.13 (MKL for fp32, oneDNN for bf16; 1 and 2 threads; sizes of nano and
SmolLM2):
- a row of a matrix product depends neither on its place nor on the other rows;
- it depends on the row COUNT below 16 rows, and above for some sizes (1536 -> 576 with 2 threads: 48 and 64 rows
  differ);
- attention of one (row, key-value head) depends on no other, but with several threads on where the buffer of its
  thread begins (models.attention.attend_alone sees to that); it depends on the number of keys, masked ones included,
  unless that is a multiple of 512 plus at most 256.
The engine therefore uses at least 16 rows, and checks the rest when it starts; what fails is not used.
"""

from __future__ import annotations

import torch

from swe_rl.models.attention import FINE_SPAN_LIMIT, FINE_SPAN_STEP, SPAN_BLOCK, SlotCache, additive_mask, attend_alone

_PROBE_SLOTS = 4
_POSITION_STEP = 53  # no multiple of a step


def spans_keep_bits(cache: SlotCache, *, num_heads: int) -> bool:
    """Whether attention over a fine span is bit-equal to that over a whole block. Overwrites the cache."""
    generator = torch.Generator().manual_seed(0)
    keys, values = cache.keys[0, :_PROBE_SLOTS], cache.values[0, :_PROBE_SLOTS]
    for tensor in (keys, values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    slots, num_kv_heads, _, head_dim = keys.shape
    shape = (slots, num_kv_heads, num_heads // num_kv_heads, head_dim)
    query = torch.randn(shape, generator=generator).to(keys)
    spans = [*range(FINE_SPAN_STEP, FINE_SPAN_LIMIT + 1, FINE_SPAN_STEP), SPAN_BLOCK]
    for position in range(20, FINE_SPAN_LIMIT, _POSITION_STEP):
        positions = torch.full((slots,), position, device=keys.device)
        outs = [
            attend_alone(query, keys[:, :, :span], values[:, :, :span], mask=additive_mask(positions, span, keys.dtype))
            for span in spans
            if span > position
        ]
        if not all(torch.equal(out, outs[-1]) for out in outs):
            return False
    return True
