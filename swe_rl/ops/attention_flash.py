"""Other people's attention kernels for packed sequences: FlashAttention 3, 4 and 2, and the one inside torch.

Each is imported when it is asked for, and used only after it has computed a small case on the device as the reference
does, forward and backward: their low-level functions take arguments that differ from release to release, and a
misunderstanding would not raise. What was wrong is told once; `usable` repeats it.

Backward passes add up in a fixed order. That of torch takes no argument for it but asks a flag of the whole process,
which belongs to the process: nothing here sets it, and `any_order` says when it is not set.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from swe_rl.ops import attention_reference
from swe_rl.ops.attention_levels import Level, SegmentKernel, Segments, backward, forward, levels
from swe_rl.ops.attention_mask import runs

PROBE_LENGTHS = (130, 1, 77)
PROBE_LIMIT = 0.02  # relative to the largest value, in bf16
HALVES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


class Flash2:
    """flash_attn 2."""

    name = "flash2"
    module = "flash_attn.flash_attn_interface"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        call = _function(self.module, "_flash_attn_varlen_forward")
        found = call(q, k, v, **_lengths(segments), dropout_p=0.0, softmax_scale=scale, causal=segments.causal)
        return found[0], found[1]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = _function(self.module, "_flash_attn_varlen_backward")
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        options = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
        options |= {"dropout_p": 0.0, "softmax_scale": scale, "causal": segments.causal, "deterministic": True}
        call(grad, q, k, v, out, lse, *grads, **_lengths(segments), **options)
        return grads


class Flash3:
    """FlashAttention 3, which is built from source for Hopper."""

    name = "flash3"
    module = "flash_attn_interface"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        call = _function(self.module, "_flash_attn_forward")
        found = call(q, k, v, **_lengths(segments), softmax_scale=scale, causal=segments.causal)
        return found[0], found[1]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = _function(self.module, "_flash_attn_backward")
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        names = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        options = {"softmax_scale": scale, "causal": segments.causal, "deterministic": True}
        call(grad, q, k, v, out, lse, **_lengths(segments), **names, **options)
        return grads


class Flash4:
    """flash_attn.cute, for Hopper and Blackwell."""

    name = "flash4"
    module = "flash_attn.cute.interface"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        call = _function(self.module, "_flash_attn_fwd")
        found = call(q, k, v, **_lengths(segments), softmax_scale=scale, causal=segments.causal, return_lse=True)
        return found[0], found[1]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = _function(self.module, "_flash_attn_bwd")
        options = {"softmax_scale": scale, "causal": segments.causal, "deterministic": True}
        dq, dk, dv = call(q, k, v, out, grad, lse, **_lengths(segments), **options)[:3]
        return dq, dk, dv


class TorchFlash:
    """The operators behind torch.nn.attention.varlen. The order of additions of backward: see any_order."""

    name = "torch_flash"
    module = "torch.nn.attention.varlen"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        found = torch.ops.aten._flash_attention_forward(
            q, k, v, *_lengths(segments).values(), 0.0, segments.causal, False, scale=scale
        )
        return found[0], found[1]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *_lengths(segments).values(), 0.0, segments.causal, state, state, scale=scale
        )
        return found


KERNELS: dict[str, Callable[[], SegmentKernel]] = {  # by preference where they are equally fast
    "flash3": Flash3,
    "flash4": Flash4,
    "flash2": Flash2,
    "torch_flash": TorchFlash,
}


def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _lengths(segments: Segments) -> dict[str, Any]:
    """Arguments that all of them name alike, in the order of torch's operators."""
    return {
        "cu_seqlens_q": segments.row_starts,
        "cu_seqlens_k": segments.key_starts,
        "max_seqlen_q": segments.max_rows,
        "max_seqlen_k": segments.max_keys,
    }


def any_order(name: str) -> str:
    """Why gradients of the kernel may be added up in another order every time; empty if they are not. torch's reads two
    flags: where a choice without a fixed order only warns, it takes that one."""
    fixed = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if name != TorchFlash.name or fixed:
        return ""
    return f"{name} adds up in any order unless the process calls torch.use_deterministic_algorithms(True)"


@functools.cache
def usable(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[bool, str]:
    """Whether the kernel is there and computes a small case of this kind rightly, and why not."""
    if dtype not in HALVES or head_dim > MAX_HEAD_DIM or head_dim % 8:
        return False, f"{name} takes bf16 and fp16 with a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}"
    if device.type != "cuda":
        return False, f"{name} needs a GPU"
    kernel = KERNELS[name]()
    try:
        importlib.import_module(kernel.module)  # type: ignore[attr-defined]
    except Exception as error:  # of other people's packages: libraries that are not there, versions that do not match
        return False, f"{name} cannot be imported: {_first_line(error)}"
    try:
        worst = probe(kernel, device, dtype, head_dim)
    except Exception as error:  # their compilers have exceptions of their own
        return False, f"{name} failed its check: {_first_line(error)}"
    if not worst <= PROBE_LIMIT:
        return False, f"{name} differs from the reference by {worst:.3g} of the largest value"
    return True, f"{name} agrees with the reference to {worst:.2g}"


def _first_line(error: Exception) -> str:
    """Type and message; assertions of kernels have none."""
    return f"{type(error).__name__}: {error!s}".splitlines()[0]


def probe(kernel: SegmentKernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """Largest difference to the reference, over the largest value, of output, LSE and gradients: documents, a tree."""
    make = torch.Generator().manual_seed(0)
    tokens = sum(PROBE_LENGTHS)
    worst = 0.0
    for kv_end in _probe_masks():
        q, k, v, grad = (torch.randn(tokens, h, head_dim, generator=make).to(device, dtype) for h in (4, 2, 2, 4))
        calls: list[Level] = levels(runs(kv_end), device) or []
        scale = head_dim**-0.5
        out, lse = forward(q, k, v, calls, scale, kernel)
        found = (out, lse, *backward(grad, q, k, v, out, lse, calls, scale, kernel))
        with torch.enable_grad():
            query, key, value = (t.float().requires_grad_() for t in (q, k, v))
            want, want_lse = attention_reference.attention(query, key, value, kv_end.to(device), scale)
            grads = torch.autograd.grad(want, (query, key, value), grad.float())
        for mine, right in zip(found, (want.detach(), want_lse.detach(), *grads), strict=True):
            worst = max(worst, float((mine.float() - right).abs().max() / right.abs().max()))
    return worst


def _probe_masks() -> list[Tensor]:
    """Documents of PROBE_LENGTHS, and a prompt of 40 tokens with two answers."""
    documents, ends = [], 0
    for length in PROBE_LENGTHS:
        ends += length
        documents += [ends] * length
    tree = [ends] * 40 + [100] * 60 + [ends] * (ends - 100)
    return [torch.tensor(documents, dtype=torch.int32), torch.tensor(tree, dtype=torch.int32)]
