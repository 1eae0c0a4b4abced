"""Forward kernel of attention under the interval mask (key k is visible to queries k <= q < kv_end[k]).

Letters: T tokens, Hq query heads, Hkv key heads, D head dim. A program owns BLOCK_M queries of one head and walks over
ranges of key blocks from ops.attention_blocks: first those that all its rows see, without a mask, then the rest that
any row sees, under it. Blocks that nobody sees are in no range. One online softmax in fp32; no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_tiles import (
    LN_2,
    LOG2_E,
    load_rows,
    load_seen_rows,
    masked_scores,
    store_rows,
    tile_columns,
    tile_rows,
)
from .launch import KernelConfig, cdiv, on_device

# By the first digits of the compute capability and BLOCK_D; 8.x covers devices with 99 KiB of shared memory.
CONFIGS = {
    (8, 64): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=4, num_stages=3),
    (8, 128): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=2),
    (8, 256): KernelConfig({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=8, num_stages=2),
    (9, 64): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 128}, num_warps=8, num_stages=3),
    (9, 128): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 128}, num_warps=8, num_stages=2),
    (9, 256): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 32}, num_warps=8, num_stages=2),
    (10, 64): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 128}, num_warps=8, num_stages=3),
    (10, 128): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=3),
    (10, 256): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=2),
}
# fp32 inputs: exact products on the ordinary units (no TF32); a path for small models and for checking.
FULL_CONFIGS = {
    64: KernelConfig({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=8, num_stages=1),
    128: KernelConfig({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=8, num_stages=1),
    256: KernelConfig({"BLOCK_M": 32, "BLOCK_N": 16}, num_warps=8, num_stages=1),
}


@triton.jit
def attend(
    state, query, key_base, value_base, kv_end, first, row, num_tokens, key_stride, value_stride, scale,
    MASKED: tl.constexpr, UPCAST: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds the keys [first, first + BLOCK_N) to (acc [M, D], running maximum in log2, sum)."""
    acc, top, total = state
    near = tile_rows(first, num_tokens, MASKED, BLOCK_N)
    key = load_rows(key_base, first, near, key_stride, D, BLOCK_D, UPCAST)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if MASKED:
        end = tl.load(kv_end + first.to(tl.int64) + near)
        scores = masked_scores(scores, row[:, None], (first + tl.arange(0, BLOCK_N))[None, :], end[None, :])
    higher = tl.maximum(top, tl.max(scores, axis=1) * scale)
    origin = higher
    if MASKED:  # a row that has seen nothing yet: -inf - -inf would be NaN
        origin = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(tl.fma(scores, scale, -origin[:, None]))
    shrink = tl.exp2(top - origin)
    total = tl.fma(total, shrink, tl.sum(p, axis=1))
    if MASKED:
        seen = tl.load(kv_end + first.to(tl.int64) + near) > first + tl.arange(0, BLOCK_N)
        value = load_seen_rows(value_base, first, near, seen, value_stride, D, BLOCK_D, UPCAST)
    else:
        value = load_rows(value_base, first, near, value_stride, D, BLOCK_D, UPCAST)
    acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return acc, higher, total


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "num_ranges"])
def forward_kernel(
    q, k, v, kv_end, full_ranges, masked_ranges, counts, out, lse,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head,
    num_tokens, num_blocks, num_ranges, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, UPCAST: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out [T, Hq, D] and lse [Hq, T] fp32. HEADS = Hq, SHARED = Hq / Hkv; strides in elements, `scale` in log2.

    full_ranges and masked_ranges [blocks, num_ranges, 2] int32 are key blocks [start, stop) of each block of queries,
    counts [blocks, 2] how many of them there are. The last blocks, which see the most in a long document, start first.
    """
    program = tl.program_id(0)
    block = num_blocks - 1 - program // HEADS
    head = program % HEADS
    first = block * BLOCK_M
    query = load_rows(
        q + head.to(tl.int64) * q_head, first, tile_rows(first, num_tokens, True, BLOCK_M), q_stride, D, BLOCK_D, UPCAST
    )
    key_base = k + (head // SHARED).to(tl.int64) * k_head
    value_base = v + (head // SHARED).to(tl.int64) * v_head
    row = first + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    place = block.to(tl.int64) * num_ranges * 2
    for number in range(0, tl.load(counts + block * 2)):
        start = tl.load(full_ranges + place + number * 2)
        stop = tl.load(full_ranges + place + number * 2 + 1)
        for offset in range(0, stop - start):  # in the interpreter a loop variable is a plain number
            acc, top, total = attend(
                (acc, top, total), query, key_base, value_base, kv_end, (start + offset) * BLOCK_N, row, num_tokens,
                k_stride, v_stride, scale, False, UPCAST, D, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    for number in range(0, tl.load(counts + block * 2 + 1)):
        start = tl.load(masked_ranges + place + number * 2)
        stop = tl.load(masked_ranges + place + number * 2 + 1)
        for offset in range(0, stop - start):  # in the interpreter a loop variable is a plain number
            acc, top, total = attend(
                (acc, top, total), query, key_base, value_base, kv_end, (start + offset) * BLOCK_N, row, num_tokens,
                k_stride, v_stride, scale, True, UPCAST, D, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    seen = total > 0
    acc = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    natural = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * LN_2, float("-inf"))
    store_rows(
        out + head.to(tl.int64) * out_head, first, num_tokens, out_stride, acc.to(out.dtype.element_ty),
        D, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    tl.store(lse + head.to(tl.int64) * num_tokens + row, natural, mask=row < num_tokens)


INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)


def forward_config(dtype: torch.dtype, head_dim: int, arch: int) -> KernelConfig:
    """The shipped configuration; compute capabilities from 12.0 have the shared memory of 8.x."""
    columns = max(64, tile_columns(head_dim))
    if dtype == torch.float32:
        return FULL_CONFIGS[columns]
    return CONFIGS[arch // 10 if arch // 10 in (9, 10) else 8, columns]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_end: Tensor,
    ranges: tuple[Tensor, Tensor, Tensor],
    scale: float,
    config: KernelConfig,
) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, D], lse [Hq, T] fp32) of q [T, Hq, D], k and v [T, Hkv, D], unit stride along D; `ranges` (full,
    masked, counts) are for the blocks of `config`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device)
    launch_forward(q, k, v, kv_end, ranges, scale, config, out=out, lse=lse)
    return out, lse


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_end: Tensor,
    ranges: tuple[Tensor, Tensor, Tensor],
    scale: float,
    config: KernelConfig,
    *,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Launches forward_kernel, which writes out and lse."""
    tokens, heads, head_dim = q.shape
    blocks = cdiv(tokens, config.constants["BLOCK_M"])
    if blocks:
        with on_device(q):
            forward_kernel[(blocks * heads,)](
                q, k, v, kv_end, *ranges, out, lse,
                *(stride for tensor in (q, k, v, out) for stride in tensor.stride()[:2]),
                tokens, blocks, ranges[0].shape[1], scale * LOG2_E.value,
                HEADS=heads, SHARED=heads // k.shape[1], UPCAST=INTERPRETED, D=head_dim,
                BLOCK_D=tile_columns(head_dim), **config.keywords(),
            )  # fmt: skip
