"""Refuses what attention cannot take, in one line that names the argument and the cure. Nothing waits for a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_attention(q: Tensor, k: Tensor, v: Tensor, kv_end: Tensor, scale: float | None) -> float:
    """The scale, 1/sqrt(D) by default. Raises ValueError for tensors that do not fit together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {tensor.dtype}: use bfloat16, float16, float32 or float64")
        if tensor.ndim != 3 or tensor.shape[1] == 0 or tensor.shape[2] == 0:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: it must be [tokens, heads, head_dim]")
        if tensor.dtype != q.dtype:
            raise ValueError(f"q is {q.dtype} and {name} is {tensor.dtype}: cast one of them")
        if tensor.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} on {tensor.device}: move one of them")
        if len(tensor) != len(q) or tensor.shape[2] != q.shape[2]:
            raise ValueError(f"{name} is {list(tensor.shape)}, q {list(q.shape)}: tokens and head_dim must agree")
    if k.shape != v.shape:
        raise ValueError(f"k is {list(k.shape)} and v {list(v.shape)}: they must agree")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads and k {k.shape[1]}: query heads must be a multiple of key heads")
    if scale is None:
        scale = q.shape[2] ** -0.5
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} must be a positive number, or None for 1/sqrt(head_dim)")
    check_kv_end(kv_end, q)
    return float(scale)


def check_kv_end(kv_end: Tensor, q: Tensor) -> None:
    """Form at once; values at once on a CPU, on a GPU later and without a wait here. Raises ValueError."""
    if kv_end.dtype != torch.int32:
        raise ValueError(f"kv_end has dtype {kv_end.dtype}: use int32")
    if kv_end.shape != (len(q),):
        raise ValueError(f"kv_end has shape {list(kv_end.shape)}, q has {len(q)} tokens: one end per token")
    if kv_end.device != q.device:
        raise ValueError(f"kv_end is on {kv_end.device} and q on {q.device}: move one of them")
    index = torch.arange(len(q), dtype=torch.int32, device=q.device)
    fine = (kv_end >= index) & (kv_end <= len(q))
    if kv_end.is_cuda:
        torch._assert_async(fine.all(), "kv_end: a value is below its index or above the number of tokens")
    elif kv_end.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(fine.all()):
        key = int((~fine).nonzero()[0])
        raise ValueError(
            f"kv_end[{key}]={int(kv_end[key])} must lie between {key} (padding) and the {len(q)} tokens there are"
        )
