"""Rotary embedding of packed queries and keys in one launch: angles from position ids, YaRN's attention factor inside.

Letters: T tokens, Hq and Hkv heads, D head dim, R = 2 HALF rotated dimensions. One program turns all heads of one
token: its HALF angles are formed once, in registers, so there is no table of positions and nothing to slice under
context parallelism. Bytes moved: 2 T (Hq + Hkv) D elements and 8 T of positions. No atomics; a token's result does not
depend on the others. The backward pass is the same kernel with the sine's sign turned round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import KernelConfig, on_device

CONFIG = KernelConfig({"BLOCK_H": 16}, num_warps=4)

# pi / 2 = P1 + P2 + P3, the first two of 14 bits: with a multiple n < 2^20 taken in two parts of 10 bits every product
# below is exact in fp32, with or without fused multiply-adds. What is left of an angle below 2^20 is off by 1e-7.
TWO_OVER_PI = tl.constexpr(0.6366197723675814)
P1 = tl.constexpr(12867 / 2**13)
P2 = tl.constexpr(15786 / 2**27)
P3 = tl.constexpr(9.9209357968054044e-10)
MAX_ANGLE = tl.constexpr(1048576.0)


@triton.jit
def sin_cos(angle):
    """(sin, cos) of fp32 angles of 0 to 2^20 radians within 2e-7. The hardware's approximations have no such bound
    beyond pi, and the library's accurate ones cannot run in the interpreter."""
    n = tl.floor(angle * TWO_OVER_PI + 0.5)
    high = tl.floor(n * (1.0 / 1024)) * 1024.0
    low = n - high
    r = (angle - high * P1) - low * P1
    r = (r - high * P2) - low * P2
    r = r - n * P3
    z = r * r  # Taylor series: the first terms left out are below 2e-9 for |r| <= pi / 4
    sin_r = r + r * z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880))))
    cos_r = 1.0 + z * (-1 / 2 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320 + z * (-1 / 3628800)))))
    quadrant = n.to(tl.int32) & 3
    odd = (quadrant & 1) == 1
    sin = tl.where(odd, cos_r, sin_r)
    cos = tl.where(odd, sin_r, cos_r)
    return tl.where(quadrant >= 2, -sin, sin), tl.where((quadrant == 1) | (quadrant == 2), -cos, cos)


@triton.jit
def _turn_heads(
    x,
    out,
    head_stride,
    out_head_stride,
    cos,
    sin,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """All heads of one token from x to out; both point to the token's first element."""
    pairs = tl.arange(0, PAIRS)
    for first in range(0, HEADS, BLOCK_H):
        heads = first + tl.arange(0, BLOCK_H)
        inside = (heads < HEADS)[:, None] & (pairs < HALF)[None, :]
        source = x + heads[:, None] * head_stride + pairs[None, :]
        target = out + heads[:, None] * out_head_stride + pairs[None, :]
        a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, (a * cos - b * sin).to(out.dtype.element_ty), mask=inside)
        tl.store(target + HALF, (b * cos + a * sin).to(out.dtype.element_ty), mask=inside)
        if BLOCK_R > 0:
            rest = tl.arange(0, BLOCK_R)
            kept = (heads < HEADS)[:, None] & (rest < REST)[None, :]
            value = tl.load(x + heads[:, None] * head_stride + 2 * HALF + rest[None, :], mask=kept, other=0.0)
            tl.store(out + heads[:, None] * out_head_stride + 2 * HALF + rest[None, :], value, mask=kept)


@triton.jit
def rope_kernel(
    q,  # [T, Hq, D]
    k,  # [T, Hkv, D]
    position_ids,  # [T]
    inv_freq,  # [HALF] fp32
    attention_factor,  # [1] fp32: Python floats are fp32 in one caller and fp64 in another
    q_out,  # [T, Hq, D] contiguous, as k_out
    k_out,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,  # HALF rounded up to a power of two
    BLOCK_R: tl.constexpr,  # HEAD_DIM - 2 HALF likewise, or 0
    INVERSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, PAIRS)
    position = tl.load(position_ids + token).to(tl.float32)
    frequency = tl.load(inv_freq + pairs, mask=pairs < HALF, other=0.0)
    angle = position * frequency
    sin, cos = sin_cos(angle)
    factor = tl.where(tl.abs(angle) < MAX_ANGLE, tl.load(attention_factor), float("nan"))
    cos = (cos * factor)[None, :]
    sin = (sin * factor)[None, :]
    if INVERSE:
        sin = -sin
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    out = q_out + token * (Q_HEADS * HEAD_DIM)
    _turn_heads(
        q + token * q_stride, out, q_head_stride, HEAD_DIM, cos, sin, Q_HEADS, HALF, REST, BLOCK_H, PAIRS, BLOCK_R
    )
    out = k_out + token * (K_HEADS * HEAD_DIM)
    _turn_heads(
        k + token * k_stride, out, k_head_stride, HEAD_DIM, cos, sin, K_HEADS, HALF, REST, BLOCK_H, PAIRS, BLOCK_R
    )


def constants(q: Tensor, k: Tensor, half: int, *, inverse: bool) -> dict[str, int | bool]:
    """constexpr arguments that follow from the shapes."""
    rest = q.shape[2] - 2 * half
    return {
        "Q_HEADS": q.shape[1],
        "K_HEADS": k.shape[1],
        "HEAD_DIM": q.shape[2],
        "HALF": half,
        "PAIRS": triton.next_power_of_2(half),
        "BLOCK_R": triton.next_power_of_2(rest) if rest else 0,
        "INVERSE": inverse,
    }


def rope(
    q: Tensor, k: Tensor, position_ids: Tensor, inv_freq: Tensor, *, attention_factor: float, inverse: bool
) -> tuple[Tensor, Tensor]:
    """Launches rope_kernel. q [T, Hq, D] and k [T, Hkv, D] bf16, fp16 or fp32 with any stride of tokens and heads;
    position_ids [T] i32 or i64, inv_freq [HALF] fp32. New contiguous tensors."""
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    factor = torch.full((1,), attention_factor, dtype=torch.float32, device=q.device)
    if len(q):
        with on_device(q):
            rope_kernel[(len(q),)](
                q,
                k,
                position_ids.contiguous(),
                inv_freq.contiguous(),
                factor,
                q_out,
                k_out,
                q.stride(0),
                q.stride(1),
                k.stride(0),
                k.stride(1),
                **constants(q, k, len(inv_freq), inverse=inverse),
                **CONFIG.keywords(),
            )
    return q_out, k_out
