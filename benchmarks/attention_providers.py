"""Implementations of attention that the benchmarks compare, each behind one function of AttentionInputs -> output.

Whoever cannot be imported or cannot run says so by an exception, and the benchmarks record its first line.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from attention_shapes import AttentionInputs
from torch import Tensor

PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4")


class CannotRun(RuntimeError):
    """Why a provider is not measured."""


def ours(inputs: AttentionInputs, **options: Any) -> Tensor:
    """The public function; on a GPU the cost model chooses."""
    from swe_rl.ops import attention

    return attention(inputs.q, inputs.k, inputs.v, kv_end=inputs.kv_end, **options)


def ours_triton(inputs: AttentionInputs) -> Tensor:
    return ours(inputs, impl="triton")


def ours_triton_fast(inputs: AttentionInputs) -> Tensor:
    """Gradient of q by atomic additions."""
    return ours(inputs, impl="triton", deterministic=False)


def sdpa_per_document(inputs: AttentionInputs) -> Tensor:
    """torch's function once per document, its own handling of shared key heads."""
    return _per_document(inputs, enable_gqa=inputs.case.heads != inputs.case.key_heads)


def sdpa_repeated_keys(inputs: AttentionInputs) -> Tensor:
    """torch's function once per document, with a copy of the keys for each query head."""
    shared = inputs.case.heads // inputs.case.key_heads
    return _per_document(inputs, repeats=shared)


def _per_document(inputs: AttentionInputs, *, enable_gqa: bool = False, repeats: int = 1) -> Tensor:
    if inputs.lengths is None:
        raise CannotRun("a tree has no documents")
    outputs, start = [], 0
    for length in inputs.lengths:
        part = slice(start, start + length)
        q, k, v = (t[part].transpose(0, 1)[None] for t in (inputs.q, inputs.k, inputs.v))
        if repeats > 1:
            k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        outputs.append(sdpa(q, k, v, is_causal=True, enable_gqa=enable_gqa)[0].transpose(0, 1))
        start += length
    return torch.cat(outputs)


def sdpa_mask(inputs: AttentionInputs) -> Tensor:
    """torch's function with the whole [T, T] mask; keys repeated."""
    from swe_rl.ops.attention_mask import dense_mask

    if inputs.case.num_tokens > 16384:
        raise CannotRun("the mask has T x T elements")
    shared = inputs.case.heads // inputs.case.key_heads
    q = inputs.q.transpose(0, 1)[None]
    k, v = (t.transpose(0, 1)[None].repeat_interleave(shared, dim=1) for t in (inputs.k, inputs.v))
    mask = dense_mask(inputs.kv_end)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


def flex(inputs: AttentionInputs) -> Tensor:
    """torch's compiled flex_attention, its block mask made outside of the measured time."""
    if inputs.case.device != "cuda":
        raise CannotRun("its backward pass needs a GPU")
    from torch.nn.attention.flex_attention import flex_attention

    compiled = _compiled(flex_attention)
    q, k, v = (t.transpose(0, 1)[None] for t in (inputs.q, inputs.k, inputs.v))
    shared = inputs.case.heads != inputs.case.key_heads
    return compiled(q, k, v, block_mask=_block_mask(inputs.kv_end), enable_gqa=shared)[0].transpose(0, 1)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


@functools.lru_cache(maxsize=1)
def _block_mask(kv_end: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < kv_end[key])

    tokens = len(kv_end)
    return create_block_mask(visible, None, None, tokens, tokens, device=kv_end.device)


def _external(name: str) -> Callable[[AttentionInputs], Tensor]:
    """A kernel of ops.attention_flash, whatever the cost model thinks of it."""

    def run(inputs: AttentionInputs) -> Tensor:
        from swe_rl.ops import attention_flash, attention_ops

        q = inputs.q
        fine, reason = attention_flash.usable(name, q.device, q.dtype, inputs.case.head_dim)
        if not fine:
            raise CannotRun(reason)
        scale = inputs.case.head_dim**-0.5
        return attention_ops.attention(q, inputs.k, inputs.v, inputs.kv_end, scale, name)[0]

    return run


PROVIDERS: dict[str, Callable[[AttentionInputs], Tensor]] = {
    "ours": ours,
    "ours_triton": ours_triton,
    "ours_triton_fast": ours_triton_fast,
    "sdpa_per_document": sdpa_per_document,
    "sdpa_repeated_keys": sdpa_repeated_keys,
    "sdpa_mask": sdpa_mask,
    "flex": flex,
    **{name: _external(name) for name in ("flash3", "flash4", "flash2", "torch_flash")},
}
ON_CPU = ("ours", "sdpa_per_document", "sdpa_repeated_keys", "sdpa_mask")


def run_provider(name: str, inputs: AttentionInputs) -> list[Tensor]:
    """One step; [output] or [output, dq, dk, dv]."""
    if inputs.case.mode == "forward":
        with torch.no_grad():
            return [PROVIDERS[name](inputs)]
    inputs.clear_gradients()
    out = PROVIDERS[name](inputs)
    out.backward(inputs.grad)
    grads = [leaf.grad for leaf in (inputs.q, inputs.k, inputs.v)]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def versions() -> str:
    """Of everything that is compared and installed."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
