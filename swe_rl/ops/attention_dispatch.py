"""The public attention functions and the choice of who computes them."""

from __future__ import annotations

import torch
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import attention_ops, attention_reference, attention_triton
from swe_rl.ops.attention_checks import check_attention
from swe_rl.ops.attention_routes import FAST, log_choice, usable_names

IMPLS = ("auto", "reference", "cpu", "triton", "flash")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kv_end: Tensor,
    scale: float | None = None,
    impl: str = "auto",
    deterministic: bool = True,
) -> Tensor:
    """Softmax attention of packed documents and of trees, under the interval mask.

    q [T, Hq, D], k and v [T, Hkv, D] of one of bf16, fp16, fp32, fp64, Hq a multiple of Hkv; kv_end [T] int32: key k is
    visible to queries k <= q < kv_end[k], padding has kv_end[k] = k. scale: of the scores, 1/sqrt(D) by default.
    impl: auto, reference, cpu (torch's kernel for CPUs), triton (ours), flash (FlashAttention 3, 4, 2 or torch's, for
    documents and forests). deterministic=False lets our kernels add up the gradient of q in any order, which is faster;
    torch's kernel is taken for it, or where the process has called torch.use_deterministic_algorithms(True).
    Returns out [T, Hq, D] in the dtype of q; rows that see no key are 0 and get gradient 0. Sums are fp32 (fp64), no
    [T, T] matrix exists but in reference. First derivatives only, but there. Raises ConfigError for a bad `impl`,
    ValueError for tensors that do not fit.
    """
    return attention_with_lse(q, k, v, kv_end=kv_end, scale=scale, impl=impl, deterministic=deterministic)[0]


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kv_end: Tensor,
    scale: float | None = None,
    impl: str = "auto",
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """As attention; returns (out, lse [Hq, T] fp32, or fp64 for fp64): the log of each row's sum of exp(score).

    lse is -inf for rows that see no key, and a constant for autograd.
    """
    number = check_attention(q, k, v, kv_end, scale)
    chosen = pick_impl(impl, q.device, q.dtype, q.shape[2], deterministic)
    if chosen == "reference":
        out, lse = attention_reference.attention(q, k, v, kv_end, number)
    else:
        out, lse = attention_ops.attention(q, k, v, kv_end, number, chosen if deterministic else chosen + FAST)
    return out, lse.detach()


@torch.compiler.assume_constant_result
def pick_impl(impl: str, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool) -> str:
    """Name of the implementation to use; on a GPU "auto" and "flash" stay, as the mask decides at each call.

    Raises ConfigError for a name that is unknown or cannot run here.
    """
    if impl not in IMPLS:
        raise ConfigError(f"impl={impl!r} is unknown: use one of {', '.join(IMPLS)}")
    if impl == "reference" or (impl == "cpu" and device.type == "cpu"):
        log_choice(impl, "asked for")
        return impl
    if impl == "auto" and device.type == "cpu":
        log_choice("cpu", "made for cpu")
        return "cpu"
    if impl == "cpu":
        raise ConfigError(f"impl='cpu' of attention cannot run here: the tensors are on {device}")
    if impl == "triton":
        fine, reason = attention_triton.usable(device.type, dtype, head_dim)
        if not fine:
            raise ConfigError(f"impl='triton' of attention cannot run here: {reason}")
        log_choice(impl, "asked for")
        return impl
    names, reasons = usable_names(device, dtype, head_dim, deterministic=deterministic)
    if impl == "flash" and not set(names) - {"triton"}:
        raise ConfigError(f"impl='flash' of attention cannot run here: {'; '.join(reasons.values())}")
    if not names:
        log_choice("reference", f"no other can run here: {'; '.join(reasons.values())}")
        return "reference"
    return impl
