"""Attention by the project's Triton kernels: metadata of the mask, launches, and what the kernels do not take.

On CPU tensors the kernels run in Triton's interpreter (TRITON_INTERPRET=1, for tests).
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import triton_rows
from swe_rl.ops.attention_facts import MaskFacts

MAX_HEAD_DIM = 256
MAX_TILE_OFFSET = 1 << 31  # offsets inside a tile are 32-bit
TILE_ROWS = 128


def usable(device: str, dtype: torch.dtype, head_dim: int) -> tuple[bool, str]:
    """Whether the kernels can run there, and why not."""
    if dtype == torch.float64:
        return False, "the Triton kernels have no fp64"
    if head_dim > MAX_HEAD_DIM:
        return False, f"the Triton kernels take a head_dim of at most {MAX_HEAD_DIM}, not {head_dim}"
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False, f"the tensors are on {device}: Triton needs a GPU, or TRITON_INTERPRET=1 from the start"
    return triton_rows.available()


def forward(q: Tensor, k: Tensor, v: Tensor, mask: MaskFacts, scale: float) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, D], lse [Hq, T] fp32)."""
    kernels = triton_rows.kernel_module("attention_forward")
    q, k, v = (_prepared(t) for t in (q, k, v))
    config = kernels.forward_config(q.dtype, q.shape[2], _architecture(q))
    ranges = mask.ranges(config.constants["BLOCK_M"], config.constants["BLOCK_N"])
    return kernels.forward(q, k, v, mask.kv_end, ranges, scale, config)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: MaskFacts,
    scale: float,
    *,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. Not deterministic: dQ by atomic additions, which saves two of seven products."""
    kernels = triton_rows.kernel_module("attention_backward")
    grad, q, k, v, out, lse = (_prepared(t) for t in (grad, q, k, v, out, lse))
    arch, tensors, kv_end = _architecture(q), (q, k, v, grad), mask.kv_end
    delta = kernels.delta(out, grad)
    config = kernels.key_config(q.dtype, q.shape[2], arch)
    bounds = mask.bounds(config.constants["BLOCK_N"])
    if not deterministic:
        total = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dk, dv = kernels.key_grad(tensors, kv_end, bounds, lse, delta, scale, config, dq=total)
        return total.to(q.dtype), dk, dv
    dk, dv = kernels.key_grad(tensors, kv_end, bounds, lse, delta, scale, config)
    config = kernels.query_config(q.dtype, q.shape[2], arch)
    ranges = mask.ranges(config.constants["BLOCK_M"], config.constants["BLOCK_N"])
    return kernels.query_grad(tensors, kv_end, ranges, lse, delta, scale, config), dk, dv


def _prepared(tensor: Tensor) -> Tensor:
    """With unit stride along the last dimension. Raises ConfigError for rows too far apart for a tile."""
    tensor = tensor.detach()
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    if tensor.ndim == 3 and tensor.stride(0) * TILE_ROWS >= MAX_TILE_OFFSET:
        raise ConfigError("q, k or v: tokens are more than 2^24 elements apart; pass a contiguous tensor")
    return tensor


def _architecture(tensor: Tensor) -> int:
    number: int = triton_rows.kernel_module("launch").architecture(tensor)
    return number
