"""Scoring kernel of the head: hidden @ weight.T with online softmax statistics; nothing of size V is written.

Letters: T rows, H hidden, V vocabulary rows of `weight`, S splits of the vocabulary. A program owns BLOCK_M rows and
one split; the long side of its tile lies along the rows, so that statistics per row are reduced over few columns.
The splits depend on V alone and the sums run in column order: a row's result is the same whatever stands beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import KernelConfig, architecture, cdiv, on_device
from .softmax_math import absorb, scaled_logits

MAX_SPLITS = 64  # two blocks of rows then fill the SMs of an H100; 64 x 5 fp32 per row is 0.2 % of its logits
GROUP = 8  # blocks of rows that walk the vocabulary together: their hidden states stay in L2

HALF_CONFIGS = {  # by the first digits of the compute capability; shared memory decides
    8: KernelConfig({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "SLICES": 1}, num_warps=8, num_stages=3),
    9: KernelConfig({"BLOCK_M": 256, "BLOCK_N": 128, "BLOCK_K": 64, "SLICES": 4}, num_warps=8, num_stages=3),
    10: KernelConfig({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "SLICES": 4}, num_warps=8, num_stages=3),
}
# fp32 inputs: exact products on the ordinary units (no TF32); a path for small models and for checking.
FULL_CONFIG = KernelConfig({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "SLICES": 1}, num_warps=8, num_stages=2)


@triton.jit
def halves(tile):
    """Left and right half of the columns of [M, N]; in the layout of an accumulator no data moves."""
    return tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def absorb_slice(logits, inv_t, col, label, num_valid, state, SOFTCAP: tl.constexpr):
    """Adds logits [M, N], whose columns are numbered `col` [N], to (max, sum e, sum e (z - max), sum e^2, z[label])."""
    top, total, weighted, squares, at_label = state
    z = scaled_logits(logits, inv_t[:, None], SOFTCAP)
    z = tl.where((col < num_valid)[None, :], z, float("-inf"))
    found = tl.where(col[None, :] == label[:, None], z, float("-inf"))
    at_label = tl.maximum(at_label, tl.max(found, axis=1))
    top, total, weighted, squares = absorb(z, top, total, weighted, squares)
    return top, total, weighted, squares, at_label


@triton.jit(do_not_specialize=["num_rows", "num_columns", "num_valid", "split_columns", "num_splits"])
def stream_kernel(
    hidden,
    weight,
    labels,
    inv_temperature,
    stats,
    hidden_stride,
    weight_stride,
    num_rows,
    num_columns,
    hidden_size,
    num_valid,
    split_columns,
    num_splits,
    SOFTCAP: tl.constexpr,
    WHOLE_K: tl.constexpr,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    """stats [S, 5, T]: max, sum e, sum e (z - max), sum e^2, z[label] of each row over the columns of each split.

    Tile offsets are 32-bit from a 64-bit base; rows and columns beyond the end repeat the last one and are dropped.
    WHOLE_K: hidden_size is a multiple of BLOCK_K. UPCAST: operands to fp32 first (the interpreter has no bf16).
    SLICES: pieces in which the columns of a tile are absorbed; more of them keep fewer exp(z) in registers at a time.
    """
    program = tl.program_id(0)
    group = program // (GROUP * num_splits)
    rank = program % (GROUP * num_splits)
    blocks = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - group * GROUP, GROUP)
    first_row = (group * GROUP + rank % blocks) * BLOCK_M
    split = rank // blocks

    row = tl.minimum(tl.arange(0, BLOCK_M), num_rows - 1 - first_row)
    base = first_row.to(tl.int64)
    inv_t = tl.load(inv_temperature + base + row)
    label = tl.load(labels + base + row).to(tl.int32)
    ks = tl.arange(0, BLOCK_K)
    hidden_tile = hidden + base * hidden_stride + (row[:, None] * hidden_stride + ks[None, :])

    nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
    zero = tl.zeros([BLOCK_M], tl.float32)
    state = (nothing, zero, zero, zero, nothing)
    stop = tl.minimum((split + 1) * split_columns, num_valid)
    for tile in range(0, tl.cdiv(stop - split * split_columns, BLOCK_N)):
        first_col = split * split_columns + tile * BLOCK_N
        near = tl.minimum(tl.arange(0, BLOCK_N), num_columns - 1 - first_col)
        weight_base = weight + first_col.to(tl.int64) * weight_stride
        weight_tile = weight_base + (near[None, :] * weight_stride + ks[:, None])
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, hidden_size, BLOCK_K):
            if WHOLE_K:
                x = tl.load(hidden_tile + k)
                w = tl.load(weight_tile + k)
            else:
                x = tl.load(hidden_tile + k, mask=ks[None, :] < hidden_size - k, other=0.0)
                w = tl.load(weight_tile + k, mask=ks[:, None] < hidden_size - k, other=0.0)
            if UPCAST:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        col = first_col + tl.arange(0, BLOCK_N // SLICES)
        if SLICES == 4:
            left, right = halves(acc)
            first, second = halves(left)
            third, fourth = halves(right)
            state = absorb_slice(first, inv_t, col, label, num_valid, state, SOFTCAP)
            state = absorb_slice(second, inv_t, col + BLOCK_N // 4, label, num_valid, state, SOFTCAP)
            state = absorb_slice(third, inv_t, col + BLOCK_N // 2, label, num_valid, state, SOFTCAP)
            state = absorb_slice(fourth, inv_t, col + 3 * (BLOCK_N // 4), label, num_valid, state, SOFTCAP)
        else:
            tl.static_assert(SLICES == 1)
            state = absorb_slice(acc, inv_t, col, label, num_valid, state, SOFTCAP)

    top, total, weighted, squares, at_label = state
    own = tl.arange(0, BLOCK_M) < num_rows - first_row
    place = stats + split.to(tl.int64) * 5 * num_rows + base + tl.arange(0, BLOCK_M)
    tl.store(place, top, mask=own)
    tl.store(place + num_rows, total, mask=own)
    tl.store(place + 2 * num_rows.to(tl.int64), weighted, mask=own)
    tl.store(place + 3 * num_rows.to(tl.int64), squares, mask=own)
    tl.store(place + 4 * num_rows.to(tl.int64), at_label, mask=own)


INTERPRETED = not isinstance(stream_kernel, triton.JITFunction)


def stream_config(dtype: torch.dtype, arch: int) -> KernelConfig:
    """The shipped configuration for inputs of `dtype`; compute capabilities from 12.0 have the shared memory of 8.x."""
    if dtype == torch.float32:
        return FULL_CONFIG
    return HALF_CONFIGS.get(arch // 10, HALF_CONFIGS[8])


def split_columns(num_columns: int, block: int) -> int:
    """Columns of a split: whole tiles, at most MAX_SPLITS splits. A function of the vocabulary alone."""
    return cdiv(cdiv(num_columns, block), MAX_SPLITS) * block


def streaming_stats(
    hidden: Tensor, weight: Tensor, labels: Tensor, inv_temperature: Tensor, *, softcap: float, num_valid: int
) -> Tensor:
    """Launches stream_kernel. hidden [T, H], weight [V, H] of one dtype, unit column strides; result [S, T, 5] fp32."""
    config = stream_config(hidden.dtype, architecture(hidden))
    rows, columns = len(hidden), len(weight)
    per_split = split_columns(columns, config.constants["BLOCK_N"])
    splits = cdiv(columns, per_split)
    stats = torch.empty(splits, 5, rows, dtype=torch.float32, device=hidden.device)
    if rows:
        with on_device(hidden):
            stream_kernel[(cdiv(rows, config.constants["BLOCK_M"]) * splits,)](
                hidden,
                weight,
                labels,
                inv_temperature,
                stats,
                hidden.stride(0),
                weight.stride(0),
                rows,
                columns,
                hidden.shape[1],
                num_valid,
                per_split,
                splits,
                SOFTCAP=softcap,
                WHOLE_K=hidden.shape[1] % config.constants["BLOCK_K"] == 0,
                UPCAST=INTERPRETED,
                GROUP=GROUP,
                **config.keywords(),
            )
    return stats.transpose(1, 2)
