"""Backward kernels of attention under the interval mask, from the stored output and log-sum-exp.

With P = exp(scale S - lse), delta = sum over D of dO * O:  dV = P' dO,  dS = P (dO V' - delta),  dK = scale dS' Q,
dQ = scale dS K. dK and dV have a program per block of keys and key head, which adds up the query heads that share it;
dQ has one per block of queries and head: seven products, no atomics, the same bits every time. The fast way adds dQ to
an fp32 buffer by atomics inside the first kernel: five products, an order that differs from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_tiles import (
    LOG2_E,
    load_rows,
    load_seen_rows,
    log2_sums,
    masked_scores,
    store_rows,
    tile_columns,
    tile_rows,
)
from .launch import KernelConfig, cdiv, on_device

DELTA_ROWS = 64
KEY_CONFIGS = {  # of dK and dV; see attention_forward.CONFIGS
    (8, 64): KernelConfig({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=4, num_stages=2),
    (8, 128): KernelConfig({"BLOCK_M": 32, "BLOCK_N": 128}, num_warps=8, num_stages=1),
    (8, 256): KernelConfig({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=8, num_stages=1),
    (9, 64): KernelConfig({"BLOCK_M": 64, "BLOCK_N": 128}, num_warps=8, num_stages=2),
    (9, 128): KernelConfig({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=8, num_stages=2),  # 64 x 128 spills 312 bytes
    (9, 256): KernelConfig({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=8, num_stages=1),
    (10, 64): KernelConfig({"BLOCK_M": 64, "BLOCK_N": 128}, num_warps=8, num_stages=2),
    (10, 128): KernelConfig({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=8, num_stages=2),
    (10, 256): KernelConfig({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=8, num_stages=1),
}
QUERY_CONFIGS = {  # of dQ
    (8, 64): KernelConfig({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=4, num_stages=2),
    (8, 128): KernelConfig({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=8, num_stages=1),
    (8, 256): KernelConfig({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=8, num_stages=1),
    (9, 64): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=2),
    (9, 128): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=2),
    (9, 256): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 32}, num_warps=8, num_stages=1),
    (10, 64): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=2),
    (10, 128): KernelConfig({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=2),
    (10, 256): KernelConfig({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=8, num_stages=1),
}
FULL_CONFIGS = {  # fp32, exact products
    64: KernelConfig({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=8, num_stages=1),
    128: KernelConfig({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=8, num_stages=1),
    256: KernelConfig({"BLOCK_M": 16, "BLOCK_N": 16}, num_warps=8, num_stages=1),
}
FULL_QUERY_CONFIGS = {**FULL_CONFIGS, 128: KernelConfig({"BLOCK_M": 16, "BLOCK_N": 32}, num_warps=8, num_stages=1)}


@triton.jit(do_not_specialize=["num_tokens"])
def delta_kernel(
    out, grad, delta, out_stride, out_head, grad_stride, grad_head, num_tokens,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta [Hq, T] fp32: sum over D of out * grad, both [T, Hq, D]."""
    program = tl.program_id(0)
    head = (program % HEADS).to(tl.int64)
    first = program // HEADS * ROWS
    rows = tile_rows(first, num_tokens, True, ROWS)
    left = load_rows(out + head * out_head, first, rows, out_stride, D, BLOCK_D, True)
    right = load_rows(grad + head * grad_head, first, rows, grad_stride, D, BLOCK_D, True)
    row = first + tl.arange(0, ROWS)
    tl.store(delta + head * num_tokens + row, tl.sum(left * right, axis=1), mask=row < num_tokens)


@triton.jit
def add_queries(
    state, key, value, q_base, grad_base, lse, delta, dq_base, kv_end, first, first_key, num_tokens,
    q_stride, grad_stride, dq_stride, scale, natural_scale,
    MASKED: tl.constexpr, ATOMIC_DQ: tl.constexpr, UPCAST: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds what the queries [first, first + BLOCK_M) give to (dk, dv) [N, D] fp32; dk lacks its factor."""
    dk, dv = state
    rows = tile_rows(first, num_tokens, MASKED, BLOCK_M)
    log_sum = log2_sums(lse, first, rows)
    if MASKED:
        seeing = log_sum != float("inf")
        query = load_seen_rows(q_base, first, rows, seeing, q_stride, D, BLOCK_D, UPCAST)
        grad = load_seen_rows(grad_base, first, rows, seeing, grad_stride, D, BLOCK_D, UPCAST)
    else:
        query = load_rows(q_base, first, rows, q_stride, D, BLOCK_D, UPCAST)
        grad = load_rows(grad_base, first, rows, grad_stride, D, BLOCK_D, UPCAST)
    scores = tl.dot(key, tl.trans(query), input_precision="ieee")
    if MASKED:  # ends are read again each time: kept in registers, they would be spilled in both loops
        near = tile_rows(first_key, num_tokens, True, BLOCK_N)
        end = tl.load(kv_end + first_key.to(tl.int64) + near)
        col = first_key + tl.arange(0, BLOCK_N)
        scores = masked_scores(scores, (first + tl.arange(0, BLOCK_M))[None, :], col[:, None], end[:, None])
    p = tl.exp2(tl.fma(scores, scale, -log_sum[None, :]))
    dp = tl.dot(value, tl.trans(grad), input_precision="ieee")
    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
    shift = tl.load(delta + first.to(tl.int64) + rows)
    ds = p * (dp - shift[None, :])
    if MASKED:
        ds = tl.where(p == 0.0, 0.0, ds)  # NaN stays
    narrow = ds.to(query.dtype)
    dk = tl.dot(narrow, query, dk, input_precision="ieee")
    if ATOMIC_DQ:
        dq = tl.dot(tl.trans(narrow), key, input_precision="ieee") * natural_scale
        ds_row = tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_D)
        place = dq_base + first.to(tl.int64) * dq_stride + (ds_row[:, None] * dq_stride + columns[None, :])
        own = (ds_row < num_tokens - first)[:, None] & (columns < D)[None, :]
        tl.atomic_add(place, dq, mask=own, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=["num_tokens"])
def key_grad_kernel(
    q, k, v, grad, kv_end, lowest_end, highest_end, lse, delta, dk_out, dv_out, dq_out,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, grad_stride, grad_head,
    dk_stride, dk_head, dv_stride, dv_head, dq_stride, dq_head, num_tokens, scale, natural_scale,
    KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, ATOMIC_DQ: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk_out and dv_out [T, Hkv, D]; with ATOMIC_DQ also dq_out [T, Hq, D] fp32 += its gradient, else it is not used.

    lowest_end and highest_end [blocks] int32 bound kv_end of each block of BLOCK_N keys: its queries are one stretch.
    """
    program = tl.program_id(0)
    block = program // KEY_HEADS
    key_head = program % KEY_HEADS
    first = block * BLOCK_N
    near = tile_rows(first, num_tokens, True, BLOCK_N)
    seen = tl.load(kv_end + first.to(tl.int64) + near) > first + tl.arange(0, BLOCK_N)
    key = load_seen_rows(k + key_head.to(tl.int64) * k_head, first, near, seen, k_stride, D, BLOCK_D, UPCAST)
    value = load_rows(v + key_head.to(tl.int64) * v_head, first, near, v_stride, D, BLOCK_D, UPCAST)
    # Blocks of queries: [start, whole) under the mask, [whole, part) see every key, [part, stop) under the mask.
    start = first // BLOCK_M
    stop = tl.cdiv(tl.load(highest_end + block), BLOCK_M)
    whole = tl.minimum(tl.cdiv(first + BLOCK_N - 1, BLOCK_M), stop)
    part = tl.maximum(whole, tl.minimum(tl.load(lowest_end + block) // BLOCK_M, stop))
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for shared in range(0, SHARED):
        head = (key_head * SHARED + shared).to(tl.int64)
        q_base = q + head * q_head
        grad_base = grad + head * grad_head
        dq_base = dq_out + head * dq_head
        head_lse = lse + head * num_tokens
        head_delta = delta + head * num_tokens
        for number in range(0, whole - start + stop - part):
            under_mask = tl.where(number < whole - start, start + number, part + number - (whole - start))
            dk, dv = add_queries(
                (dk, dv), key, value, q_base, grad_base, head_lse, head_delta, dq_base, kv_end, under_mask * BLOCK_M,
                first, num_tokens, q_stride, grad_stride, dq_stride, scale, natural_scale,
                True, ATOMIC_DQ, UPCAST, D, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        for number in range(0, part - whole):
            dk, dv = add_queries(
                (dk, dv), key, value, q_base, grad_base, head_lse, head_delta, dq_base, kv_end,
                (whole + number) * BLOCK_M, first, num_tokens, q_stride, grad_stride, dq_stride, scale, natural_scale,
                False, ATOMIC_DQ, UPCAST, D, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    dk = (dk * natural_scale).to(dk_out.dtype.element_ty)
    store_rows(dk_out + key_head.to(tl.int64) * dk_head, first, num_tokens, dk_stride, dk, D, BLOCK_N, BLOCK_D)
    dv = dv.to(dv_out.dtype.element_ty)
    store_rows(dv_out + key_head.to(tl.int64) * dv_head, first, num_tokens, dv_stride, dv, D, BLOCK_N, BLOCK_D)


@triton.jit
def add_keys(
    dq, query, grad, log_sum, shift, key_base, value_base, kv_end, first, row, num_tokens, key_stride, value_stride,
    scale, MASKED: tl.constexpr, UPCAST: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds what the keys [first, first + BLOCK_N) give to dq [M, D] fp32, which lacks its factor."""
    near = tile_rows(first, num_tokens, MASKED, BLOCK_N)
    col = first + tl.arange(0, BLOCK_N)
    if MASKED:
        seen = tl.load(kv_end + first.to(tl.int64) + near) > col
        key = load_seen_rows(key_base, first, near, seen, key_stride, D, BLOCK_D, UPCAST)
    else:
        key = load_rows(key_base, first, near, key_stride, D, BLOCK_D, UPCAST)
    value = load_rows(value_base, first, near, value_stride, D, BLOCK_D, UPCAST)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if MASKED:
        end = tl.load(kv_end + first.to(tl.int64) + near)
        scores = masked_scores(scores, row[:, None], col[None, :], end[None, :])
    p = tl.exp2(tl.fma(scores, scale, -log_sum[:, None]))
    ds = p * (tl.dot(grad, tl.trans(value), input_precision="ieee") - shift[:, None])
    if MASKED:
        ds = tl.where(p == 0.0, 0.0, ds)  # NaN stays
    return tl.dot(ds.to(key.dtype), key, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "num_ranges"])
def query_grad_kernel(
    q, k, v, grad, kv_end, full_ranges, masked_ranges, counts, lse, delta, dq_out,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, grad_stride, grad_head, dq_stride, dq_head,
    num_tokens, num_blocks, num_ranges, scale, natural_scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, UPCAST: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq_out [T, Hq, D]; ranges and order of programs as in attention_forward.forward_kernel."""
    program = tl.program_id(0)
    block = num_blocks - 1 - program // HEADS
    head = program % HEADS
    first = block * BLOCK_M
    rows = tile_rows(first, num_tokens, True, BLOCK_M)
    query = load_rows(q + head.to(tl.int64) * q_head, first, rows, q_stride, D, BLOCK_D, UPCAST)
    out_grad = load_rows(grad + head.to(tl.int64) * grad_head, first, rows, grad_stride, D, BLOCK_D, UPCAST)
    own = head.to(tl.int64) * num_tokens
    log_sum = log2_sums(lse + own, first, rows)
    shift = tl.load(delta + own + first.to(tl.int64) + rows)
    key_base = k + (head // SHARED).to(tl.int64) * k_head
    value_base = v + (head // SHARED).to(tl.int64) * v_head
    row = first + tl.arange(0, BLOCK_M)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    place = block.to(tl.int64) * num_ranges * 2
    for number in range(0, tl.load(counts + block * 2)):
        start = tl.load(full_ranges + place + number * 2)
        stop = tl.load(full_ranges + place + number * 2 + 1)
        for offset in range(0, stop - start):  # in the interpreter a loop variable is a plain number
            dq = add_keys(
                dq, query, out_grad, log_sum, shift, key_base, value_base, kv_end, (start + offset) * BLOCK_N,
                row, num_tokens, k_stride, v_stride, scale, False, UPCAST, D, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    for number in range(0, tl.load(counts + block * 2 + 1)):
        start = tl.load(masked_ranges + place + number * 2)
        stop = tl.load(masked_ranges + place + number * 2 + 1)
        for offset in range(0, stop - start):  # in the interpreter a loop variable is a plain number
            dq = add_keys(
                dq, query, out_grad, log_sum, shift, key_base, value_base, kv_end, (start + offset) * BLOCK_N,
                row, num_tokens, k_stride, v_stride, scale, True, UPCAST, D, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    dq = (dq * natural_scale).to(dq_out.dtype.element_ty)
    store_rows(dq_out + head.to(tl.int64) * dq_head, first, num_tokens, dq_stride, dq, D, BLOCK_M, BLOCK_D)


INTERPRETED = not isinstance(key_grad_kernel, triton.JITFunction)


def _config(
    configs: dict[tuple[int, int], KernelConfig],
    full: dict[int, KernelConfig],
    dtype: torch.dtype,
    head_dim: int,
    arch: int,
) -> KernelConfig:
    columns = max(64, tile_columns(head_dim))
    if dtype == torch.float32:
        return full[columns]
    return configs[arch // 10 if arch // 10 in (9, 10) else 8, columns]


def key_config(dtype: torch.dtype, head_dim: int, arch: int) -> KernelConfig:
    """Of key_grad_kernel."""
    return _config(KEY_CONFIGS, FULL_CONFIGS, dtype, head_dim, arch)


def query_config(dtype: torch.dtype, head_dim: int, arch: int) -> KernelConfig:
    """Of query_grad_kernel."""
    return _config(QUERY_CONFIGS, FULL_QUERY_CONFIGS, dtype, head_dim, arch)


def delta(out: Tensor, grad: Tensor) -> Tensor:
    """Launches delta_kernel; out and grad [T, Hq, D] with unit stride along D."""
    tokens, heads, head_dim = out.shape
    found = torch.empty(heads, tokens, dtype=torch.float32, device=out.device)
    if tokens:
        with on_device(out):
            delta_kernel[(cdiv(tokens, DELTA_ROWS) * heads,)](
                out, grad, found, *out.stride()[:2], *grad.stride()[:2], tokens,
                HEADS=heads, D=head_dim, BLOCK_D=tile_columns(head_dim), ROWS=DELTA_ROWS,
            )  # fmt: skip
    return found


def key_grad(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    kv_end: Tensor,
    bounds: tuple[Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    scale: float,
    config: KernelConfig,
    *,
    dq: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launches key_grad_kernel on (q, k, v, grad); bounds: lowest and highest end of each block of keys.

    dq [T, Hq, D] fp32, zero at first, gets the gradient of q by atomic additions. Returns gradients of k and v.
    """
    q, k, v, _ = tensors
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    tokens, heads, head_dim = q.shape
    blocks = cdiv(tokens, config.constants["BLOCK_N"])
    if blocks:
        last = dk if dq is None else dq
        with on_device(q):
            key_grad_kernel[(blocks * k.shape[1],)](
                *tensors, kv_end, *bounds, lse, delta, dk, dv, last,
                *(stride for tensor in (*tensors, dk, dv, last) for stride in tensor.stride()[:2]),
                tokens, scale * LOG2_E.value, scale,
                KEY_HEADS=k.shape[1], SHARED=heads // k.shape[1], ATOMIC_DQ=dq is not None, UPCAST=INTERPRETED,
                D=head_dim, BLOCK_D=tile_columns(head_dim), **config.keywords(),
            )  # fmt: skip
    return dk, dv


def query_grad(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    kv_end: Tensor,
    ranges: tuple[Tensor, Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    scale: float,
    config: KernelConfig,
) -> Tensor:
    """Launches query_grad_kernel on (q, k, v, grad); `ranges` as for the forward kernel. Returns the gradient of q."""
    q, k = tensors[:2]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tokens, heads, head_dim = q.shape
    blocks = cdiv(tokens, config.constants["BLOCK_M"])
    if blocks:
        with on_device(q):
            query_grad_kernel[(blocks * heads,)](
                *tensors, kv_end, *ranges, lse, delta, dq,
                *(stride for tensor in (*tensors, dq) for stride in tensor.stride()[:2]),
                tokens, blocks, ranges[0].shape[1], scale * LOG2_E.value, scale,
                HEADS=heads, SHARED=heads // k.shape[1], UPCAST=INTERPRETED,
                D=head_dim, BLOCK_D=tile_columns(head_dim), **config.keywords(),
            )  # fmt: skip
    return dq
