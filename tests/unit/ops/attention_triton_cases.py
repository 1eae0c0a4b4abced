"""Values of the Triton attention kernels, on CPU tensors. Collected by test_attention_triton.py only, in a process with
TRITON_INTERPRET=1: whether a kernel is interpreted is settled when it is decorated."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    PADDED,
    check,
    check_padding,
    crossing,
    exact,
    make,
    packed,
    padded,
    poisoned,
    random_forest,
    results,
)
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import attention, attention_with_lse
from swe_rl.ops.attention_blocks import key_ranges
from swe_rl.ops.attention_ops import attention_backward
from swe_rl.ops.triton_rows import kernel_module

MASKS = ("document", "documents", "forest", "crossing")


def mask(kind: str, tokens: int) -> Tensor:
    padding = min(5, tokens - 1)
    if kind == "document":
        return packed(tokens)
    if kind == "documents":
        third = (tokens - padding) // 3
        return packed(*[n for n in (third, third // 2, tokens - padding - third - third // 2) if n], padding=padding)
    return random_forest(tokens, 3, padding=padding)[0] if kind == "forest" else crossing(tokens, 3)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("tokens", "shared"), [(1, 4), (17, 8), (129, 1), (129, 4)])
def test_values_and_gradients(tokens: int, shared: int, kind: str) -> None:
    key_heads = 2 if tokens < 129 else 1
    kv_end, tensors = mask(kind, tokens), make(tokens, key_heads * shared, key_heads, 16)
    want = exact(tensors, kv_end)
    found = results(attention_with_lse, tensors, kv_end, impl="triton")
    check(found, want)
    if shared == 4:
        again = results(attention_with_lse, tensors, kv_end, impl="triton")
        assert all(map(torch.equal, again, found))
        check(results(attention_with_lse, tensors, kv_end, impl="triton", deterministic=False), want)


@pytest.mark.parametrize(
    ("kind", "dtype", "limit"), [("documents", torch.float32, 1e-5), ("forest", torch.float16, 2e-3)]
)
def test_a_thousand_tokens(kind: str, dtype: torch.dtype, limit: float) -> None:
    kv_end, tensors = mask(kind, 1000), make(1000, 1, 1, 16, dtype=dtype)  # fp16: tiles as shipped
    check(results(attention_with_lse, tensors, kv_end, impl="triton"), exact(tensors, kv_end), limit=limit)


@pytest.mark.parametrize(
    ("head_dim", "tokens", "dtype"),
    [
        (64, 150, torch.float32), (80, 200, torch.float16), (128, 200, torch.float16), (256, 140, torch.float16),
        (128, 70, torch.float32),
    ],
)  # fmt: skip
def test_head_dims_and_shipped_tiles(head_dim: int, tokens: int, dtype: torch.dtype) -> None:
    kv_end, tensors = mask("forest", tokens), make(tokens, 2, 1, head_dim, dtype=dtype)
    found = results(attention_with_lse, tensors, kv_end, impl="triton")
    assert [t.dtype for t in found] == [dtype, torch.float32, dtype, dtype, dtype]
    check(found, exact(tensors, kv_end), limit=1e-5 if dtype == torch.float32 else 2e-3)


def test_bf16_inputs_are_computed_in_fp32() -> None:
    kv_end, tensors = mask("forest", 129), make(129, 4, 2, 64, dtype=torch.bfloat16)
    found = results(attention_with_lse, tensors, kv_end, impl="triton")
    check(found, exact(tensors, kv_end), limit=2.0**-6)  # the interpreter truncates when it stores bf16


@pytest.mark.parametrize("kind", PADDED)
def test_padding_is_zero_whatever_it_holds(kind: str) -> None:
    kv_end, tensors = padded(kind), make(150, 2, 1, 16)
    dirty, blind, unseen = poisoned(tensors, kv_end)
    want = exact(tensors, kv_end)
    for deterministic in (True, False):
        found = results(attention_with_lse, dirty, kv_end, impl="triton", deterministic=deterministic)
        check_padding(found, want, blind, unseen)


def test_padding_of_shipped_tiles_and_columns() -> None:
    kv_end, tensors = padded("between"), make(150, 2, 1, 80, dtype=torch.float16)
    dirty, blind, unseen = poisoned(tensors, kv_end)
    found = results(attention_with_lse, dirty, kv_end, impl="triton")
    check_padding(found, exact(tensors, kv_end), blind, unseen, limit=2e-3)


def test_nothing_but_padding_and_no_tokens() -> None:
    only = torch.arange(40, dtype=torch.int32)
    out, lse, *grads = results(attention_with_lse, make(40, 2, 1, 16), only, impl="triton")
    assert not any(t.any() for t in (out, *grads))
    assert (lse == -torch.inf).all()
    out, lse, *grads = results(attention_with_lse, make(0, 2, 1, 16), only[:0], impl="triton")
    assert out.shape == (0, 2, 16)


def test_strides_and_scale() -> None:
    kv_end = mask("forest", 129)
    wide = torch.randn(2, 8, 129, 3, 16)
    q, k, v = (wide[0, :heads, :, part].transpose(0, 1) for part, heads in enumerate((8, 2, 2)))
    grad = torch.randn(129, 16, 8).transpose(1, 2)
    found = results(attention_with_lse, (q, k, v, grad), kv_end, impl="triton", scale=0.7)
    check(found, exact((q, k, v, grad), kv_end, scale=0.7))
    constant = torch.randn(129, 8, 1).expand(-1, -1, 16)
    found = results(attention_with_lse, (q, k, v, constant), kv_end, impl="triton")
    check(found, exact((q, k, v, constant), kv_end))


def test_large_scores() -> None:
    kv_end = mask("forest", 129)
    q, k, v, grad = make(129, 2, 1, 16)
    tensors = (15 * q, 15 * k, v, grad)
    largest = float(torch.einsum("qhd,kjd->hqkj", 15 * q, 15 * k).abs().max())
    check(
        results(attention_with_lse, tensors, kv_end, impl="triton", scale=1.0),
        exact(tensors, kv_end, scale=1.0),
        limit=torch.finfo(torch.float32).eps * largest,  # what rounding of a score does to its weight
    )


def far(tensor: Tensor, stride: int) -> Tensor:
    """The same values, its tokens `stride` elements apart; untouched pages cost nothing."""
    room = torch.empty((len(tensor) - 1) * stride + tensor[0].numel(), dtype=tensor.dtype)
    places = (stride, *tensor.stride()[1:])
    return room.as_strided(tensor.shape, places).copy_(tensor)


def test_offsets_of_tokens_are_64_bit() -> None:
    tokens, stride = 300, (1 << 23) + 16  # the last token begins at 2.5e9
    kv_end = mask("documents", tokens)
    tensors = make(tokens, 1, 1, 16, dtype=torch.float16)
    near = results(attention_with_lse, tensors, kv_end, impl="triton")
    q, k, v, grad = (far(tensor, stride) for tensor in tensors)
    out, lse = attention_with_lse(q, k, v, kv_end=kv_end, impl="triton")
    grads = attention_backward(grad, q, k, v, out, lse, kv_end, 0.25, "triton")
    assert all(map(torch.equal, (out, lse, *grads), near))


def test_offsets_of_heads_are_64_bit() -> None:
    tokens, stride = 20, (1 << 30) + 16  # itself 32-bit: a larger one makes every product with it 64-bit
    kv_end = mask("documents", tokens)
    q, k, v, _ = make(tokens, 3, 3, 16)
    near = attention(q, k, v, kv_end=kv_end, impl="triton")
    spread = []
    for tensor in (q, k, v):
        room = torch.empty(2 * stride + tokens * 16)
        spread.append(room.as_strided(tensor.shape, (16, stride, 1)).copy_(tensor))
    assert torch.equal(attention(*spread, kv_end=kv_end, impl="triton"), near)


def test_stored_rows_are_64_bit() -> None:
    """Output and gradients of T x heads x dim > 2^31 elements, by the stride of the tensor that a kernel writes."""
    kernels, stride, tokens = kernel_module("attention_forward"), (1 << 23) + 16, 300
    kv_end = mask("documents", tokens)
    q, k, v, _ = make(tokens, 1, 1, 16, dtype=torch.float16)
    out, lse = attention_with_lse(q, k, v, kv_end=kv_end, impl="triton")
    config = kernels.forward_config(q.dtype, 16, 90)
    blocks = [config.constants[name] for name in ("BLOCK_M", "BLOCK_N")]
    room = far(torch.zeros_like(out), stride)
    norms = torch.zeros_like(lse)
    kernels.launch_forward(q, k, v, kv_end, key_ranges(kv_end, *blocks), 0.25, config, out=room, lse=norms)
    assert torch.equal(room, out)
    assert torch.equal(norms, lse)


def test_tokens_too_far_apart_are_refused() -> None:
    q, k, v, _ = make(2, 1, 1, 16)
    with pytest.raises(ConfigError, match=r"tokens are more than 2\^24 elements apart"):
        attention(far(q, 1 << 24), k, v, kv_end=packed(2), impl="triton")
