"""Attention as operators of torch.library, so that torch.compile and autograd see opaque calls with known shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swe_rl.ops import attention_routes

FIRST_ORDER = "attention has first derivatives only: differentiate it without create_graph, or use impl='reference'"


@torch.library.custom_op("swe_rl::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, kv_end: Tensor, scale: float, impl: str) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, D], lse [Hq, T] fp32 or fp64)."""
    return attention_routes.forward(q.detach(), k.detach(), v.detach(), kv_end, scale, impl)


@attention.register_fake
def _(q, k, v, kv_end, scale, impl):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32)
    )


@torch.library.custom_op("swe_rl::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kv_end: Tensor, scale: float, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous, in their dtype."""
    return attention_routes.backward(grad, q, k, v, out, lse, kv_end, scale, impl)


@attention_backward.register_fake
def _(grad, q, k, v, out, lse, kv_end, scale, impl):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, kv_end, ctx.scale, ctx.impl = inputs
    ctx.save_for_backward(q, k, v, *output, kv_end)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None, None
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(FIRST_ORDER)
    q, k, v, out, lse, kv_end = ctx.saved_tensors
    return *attention_backward(grad, q, k, v, out, lse, kv_end, ctx.scale, ctx.impl), None, None, None


attention.register_autograd(_differentiate, setup_context=_save)
