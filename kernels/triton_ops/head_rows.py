"""Row kernels of the policy-gradient head: statistics of given logits, and their gradient.

Letters: C rows of a chunk, V vocabulary columns of this shard. Both kernels read logits once; no atomics, so results
repeat bit for bit, and a row's result does not depend on the other rows. Grids are one-dimensional (the second
dimension of a CUDA grid ends at 65535) and row offsets 64-bit (8192 x 151936 columns are more than 2^30).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import KernelConfig, cdiv, on_device
from .softmax_math import absorb, merge_lanes, scaled_logits, tanh_and_slope

# Lanes keep a running maximum and sums of their own, combined once at the end: no reduction across warps per tile.
# The 4 columns that a lane reads at a time are 16 bytes, one vector load of one thread.
STATS_CONFIG = KernelConfig({"LANES": 1024, "PER_LANE": 4}, num_warps=8)
GRAD_CONFIG = KernelConfig({"BLOCK": 4096}, num_warps=8)


@triton.jit(do_not_specialize=["num_valid"])
def row_stats_kernel(
    logits,
    labels,
    inv_temperature,
    stats,
    row_stride,
    num_valid,
    SOFTCAP: tl.constexpr,
    LANES: tl.constexpr,
    PER_LANE: tl.constexpr,
):
    """One program per row: max, sum e, sum e (z - max), sum e^2, z[label] into stats [C, 5]."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * row_stride
    inv_t = tl.load(inv_temperature + row)
    label = tl.load(labels + row)
    BLOCK: tl.constexpr = LANES * PER_LANE
    cols = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    squares = tl.zeros([LANES], tl.float32)
    whole = num_valid // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        z = scaled_logits(tl.load(row_logits + start + cols), inv_t, SOFTCAP)
        top, total, weighted, squares = absorb(z, top, total, weighted, squares)
    if whole < num_valid:
        inside = whole + cols < num_valid
        z = scaled_logits(tl.load(row_logits + whole + cols, mask=inside, other=0.0), inv_t, SOFTCAP)
        z = tl.where(inside, z, float("-inf"))
        top, total, weighted, squares = absorb(z, top, total, weighted, squares)
    highest, total_all, weighted_all, squares_all = merge_lanes(top, total, weighted, squares)
    here = (label >= 0) & (label < num_valid)
    at_label = scaled_logits(tl.load(row_logits + label, mask=here, other=0.0), inv_t, SOFTCAP)
    tl.store(stats + row * 5, highest)
    tl.store(stats + row * 5 + 1, total_all)
    tl.store(stats + row * 5 + 2, weighted_all)
    tl.store(stats + row * 5 + 3, squares_all)
    tl.store(stats + row * 5 + 4, tl.where(here, at_label, float("-inf")))


@triton.jit
def _grad_tile(logits, cols, label, inv_t, top, log_sum, at_label, c0, c1, SOFTCAP: tl.constexpr):
    """dlogits of one tile: (g [col = label] + p (c0 + c1 log p)) inv_t slope; p = 0 gives exactly 0, NaN stays NaN."""
    slope = 1.0
    if SOFTCAP > 0:
        bounded, slope = tanh_and_slope(logits / SOFTCAP)
        logits = SOFTCAP * bounded
    logp = (logits * inv_t - top) - log_sum
    p = tl.exp(logp)
    dz = tl.where(p == 0.0, 0.0, p * (c0 + c1 * logp))
    dz += tl.where(cols == label, at_label, 0.0)
    return dz * inv_t * slope


@triton.jit(do_not_specialize=["num_columns", "num_valid", "tiles"])
def row_grad_kernel(
    logits,
    labels,
    inv_temperature,
    coeffs,
    out,
    row_stride,
    out_stride,
    num_columns,
    num_valid,
    tiles,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and tile of BLOCK columns; `out` may be `logits`: what is written was read here."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    first = program % tiles * BLOCK
    row_logits = logits + row * row_stride + first
    row_out = out + row * out_stride + first
    inv_t = tl.load(inv_temperature + row)
    label = tl.load(labels + row).to(tl.int32) - first
    top = tl.load(coeffs + row * 5)
    log_sum = tl.load(coeffs + row * 5 + 1)
    at_label = tl.load(coeffs + row * 5 + 2)
    c0 = tl.load(coeffs + row * 5 + 3)
    c1 = tl.load(coeffs + row * 5 + 4)
    cols = tl.arange(0, BLOCK)
    if first + BLOCK <= num_valid:
        grad = _grad_tile(tl.load(row_logits + cols), cols, label, inv_t, top, log_sum, at_label, c0, c1, SOFTCAP)
        tl.store(row_out + cols, grad.to(out.dtype.element_ty))
    else:
        inside = first + cols < num_valid
        tile = tl.load(row_logits + cols, mask=inside, other=0.0)
        grad = _grad_tile(tile, cols, label, inv_t, top, log_sum, at_label, c0, c1, SOFTCAP)
        grad = tl.where(inside, grad, 0.0)
        tl.store(row_out + cols, grad.to(out.dtype.element_ty), mask=first + cols < num_columns)


def row_stats(
    logits: Tensor, labels: Tensor, inv_temperature: Tensor, *, softcap: float, num_valid: int, config: KernelConfig
) -> Tensor:
    """Launches row_stats_kernel. logits [C, V] fp32 with unit column stride; result [C, 5] fp32."""
    stats = torch.empty(len(logits), 5, dtype=torch.float32, device=logits.device)
    if len(logits):
        with on_device(logits):
            row_stats_kernel[(len(logits),)](
                logits,
                labels,
                inv_temperature,
                stats,
                logits.stride(0),
                num_valid,
                SOFTCAP=softcap,
                **config.keywords(),
            )
    return stats


def row_grad(
    logits: Tensor,
    labels: Tensor,
    inv_temperature: Tensor,
    coeffs: Tensor,
    *,
    softcap: float,
    num_valid: int,
    out: Tensor,
    config: KernelConfig,
) -> Tensor:
    """Launches row_grad_kernel. logits [C, V] fp32, coeffs [C, 5] fp32; out [C, V] of any float dtype, or logits."""
    rows, columns = logits.shape
    tiles = cdiv(columns, config.constants["BLOCK"])
    if rows * tiles:
        with on_device(logits):
            row_grad_kernel[(rows * tiles,)](
                logits,
                labels,
                inv_temperature,
                coeffs,
                out,
                logits.stride(0),
                out.stride(0),
                columns,
                num_valid,
                tiles,
                SOFTCAP=softcap,
                **config.keywords(),
            )
    return out
