"""The public attention functions and the choice of who computes them."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import attention_ops, attention_reference
from swe_rl.ops.attention_checks import check_attention

IMPLS = ("auto", "reference", "cpu", "triton")
log = logging.getLogger(__name__)


@functools.cache
def _log_choice(impl: str, reason: str) -> None:
    """Once per choice: what runs, and why."""
    log.info("attention: impl=%s (%s)", impl, reason)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, kv_end: Tensor, scale: float | None = None, impl: str = "auto"
) -> Tensor:
    """Softmax attention of packed documents and of trees, under the interval mask.

    q [T, Hq, D], k and v [T, Hkv, D] of one of bf16, fp16, fp32, fp64, Hq a multiple of Hkv; kv_end [T] int32: key k is
    visible to queries k <= q < kv_end[k], padding has kv_end[k] = k. scale: of the scores, 1/sqrt(D) by default.
    Returns out [T, Hq, D] in the dtype of q; rows that see no key are 0 and get gradient 0. Sums are fp32 (fp64), no
    [T, T] matrix exists. Deterministic. First derivatives only. Raises ConfigError for a bad `impl`, ValueError for
    tensors that do not fit.
    """
    return attention_with_lse(q, k, v, kv_end=kv_end, scale=scale, impl=impl)[0]


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, kv_end: Tensor, scale: float | None = None, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """As attention; returns (out, lse [Hq, T] fp32, or fp64 for fp64): the log of each row's sum of exp(score).

    lse is -inf for rows that see no key, and a constant for autograd.
    """
    number = check_attention(q, k, v, kv_end, scale)
    chosen = pick_impl(impl, q.device.type, q.dtype)
    if chosen == "reference":
        out, lse = attention_reference.attention(q, k, v, kv_end, number)
    else:
        out, lse = attention_ops.attention(q, k, v, kv_end, number, chosen)
    return out, lse.detach()


@torch.compiler.assume_constant_result
def pick_impl(impl: str, device: str, dtype: torch.dtype) -> str:
    """Name of the implementation to use. Raises ConfigError for a name that is unknown or cannot run here."""
    if impl not in IMPLS:
        raise ConfigError(f"impl={impl!r} is unknown: use one of {', '.join(IMPLS)}")
    if impl == "reference":
        _log_choice(impl, "asked for")
        return impl
    wanted = impl if impl != "auto" else "cpu"
    if wanted == "cpu" and device == "cpu":
        _log_choice(wanted, "asked for" if impl != "auto" else f"made for {device}")
        return wanted
    if impl != "auto":
        raise ConfigError(f"impl={impl!r} of attention cannot run here: the tensors are {dtype} on {device}")
    _log_choice("reference", f"no other runs on {device}")
    return "reference"
