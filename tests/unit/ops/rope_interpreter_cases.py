"""Values of the Triton rope kernel on CPU tensors. Collected by test_rope.py only, in a process with
TRITON_INTERPRET=1: whether a kernel is interpreted is settled when it is decorated."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from swe_rl.models.rope import Rope
from swe_rl.ops import rope, rope_ops, triton_rows

# (tokens, query heads, key heads, head dim, rotated dimensions): no power of two, more heads than a block, a rest
SHAPES = ((1, 1, 1, 2, 2), (3, 4, 2, 24, 24), (2, 17, 8, 64, 64), (2, 33, 3, 128, 96), (5, 2, 1, 16, 10))
kernels = triton_rows.kernel_module("rope")
sin_cos = kernels.sin_cos


@triton.jit
def sin_cos_of(angles, sin, cos, BLOCK: tl.constexpr):
    """Elementwise."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s, c = sin_cos(tl.load(angles + place))
    tl.store(sin + place, s)
    tl.store(cos + place, c)


def test_sine_and_cosine_of_any_angle_of_a_million_positions() -> None:
    half_turns = torch.arange(1 << 15).float() * (torch.pi / 2)  # where the quadrant changes
    angles = torch.cat([torch.rand(1 << 15) * scale for scale in (1e-3, 10.0, 131072.0, 2.0**20)])
    angles = torch.cat([angles, half_turns, half_turns.nextafter(torch.tensor(0.0)), half_turns * 20])
    sin, cos = torch.empty_like(angles), torch.empty_like(angles)
    sin_cos_of[(len(angles) >> 12,)](angles, sin, cos, 1 << 12)
    assert (sin - angles.double().sin()).abs().max() <= 2e-7
    assert (cos - angles.double().cos()).abs().max() <= 2e-7


def make(tokens: int, q_heads: int, k_heads: int, dim: int, rotated: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    positions = torch.randint(0, 131072, (tokens,))
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    q, k = (torch.randn(tokens, heads, dim, dtype=dtype) for heads in (q_heads, k_heads))
    return q, k, positions, inv_freq


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_is_the_reference(shape: tuple[int, ...], inverse: bool, dtype: torch.dtype) -> None:
    arguments = make(*shape, dtype)
    found = rope_ops.turn(*arguments, 1.1386, inverse, "triton")
    again = rope_ops.turn(*arguments, 1.1386, inverse, "triton")
    exact = rope_ops.reference(
        *(x.float() for x in arguments[:2]), *arguments[2:], attention_factor=1.1386, inverse=inverse
    )
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    for a, b, c in zip(found, exact, again, strict=True):
        assert a.dtype == dtype
        assert a.is_contiguous()
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance)
        assert torch.equal(a, c)


def test_the_kernel_turns_by_the_tables_of_the_model() -> None:
    """A pair (1, 0) becomes (cos, sin): equal to the tables of YaRN within 1e-6 at the ends of both contexts."""
    described = Rope(theta=1e6, dim=128, factor=4.0, original_context=32768)
    positions = torch.tensor([0, 1, 32767, 32768, 131071, 1048575])
    ones = torch.cat([torch.ones(6, 1, 64), torch.zeros(6, 1, 64)], dim=-1)
    found, _ = rope(ones, ones, positions, described.inv_freq(), attention_factor=described.scaling, impl="triton")
    for table, half in zip(described.tables(positions), (found[:, 0, :64], found[:, 0, 64:]), strict=True):
        torch.testing.assert_close(half, table, rtol=0, atol=1e-6)


def test_positions_beyond_the_last_angle_become_nan() -> None:
    q, k, _, inv_freq = make(3, 2, 1, 8, 8, torch.float32)
    found = rope_ops.turn(q, k, torch.tensor([7, 1 << 20, (1 << 20) - 1]), inv_freq, 1.0, False, "triton")
    for heads in found:
        assert heads.isnan().any(dim=2).any(dim=1).tolist() == [False, True, False]


def test_gradients() -> None:
    q, k, positions, inv_freq = make(3, 4, 2, 24, 20, torch.float32)
    upstream = torch.randn_like(q), torch.randn_like(k)
    grads = []
    for impl in ("triton", "reference"):
        leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
        out = rope(*leaves, positions, inv_freq, attention_factor=1.1386, impl=impl)
        torch.autograd.backward(out, upstream)
        grads.append([leaf.grad for leaf in leaves])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_strided_heads_and_int32_positions() -> None:
    q, k, positions, inv_freq = make(3, 4, 2, 8, 8, torch.float32)
    fused = torch.cat([q, k], dim=1)
    found = rope(fused[:, :4], fused[:, 4:], positions.int(), inv_freq, impl="triton")
    apart = torch.randn(3, 8, 4).transpose(1, 2)  # no unit stride along the head
    for a, b in zip(found, rope(q, k, positions, inv_freq, impl="triton"), strict=True):
        assert torch.equal(a, b)
    a, b = (rope(x, k, positions, inv_freq, impl="triton")[0] for x in (apart, apart.contiguous()))
    assert torch.equal(a, b)


def test_offsets_beyond_32_bits() -> None:
    """Three tokens 2^30 + 16 elements apart (larger strides would make every product 64-bit by themselves), in one
    mapping of memory of which only their pages exist."""
    distance = (1 << 30) + 16
    far = torch.empty(2 * distance + 8, dtype=torch.float16).as_strided((3, 1, 8), (distance, 8, 1))
    near = torch.randn(3, 1, 8).half()
    far.copy_(near)
    positions, inv_freq = torch.tensor([3, 70000, 5]), torch.ones(4)
    for a, b in zip(
        rope(far, far, positions, inv_freq, impl="triton"), rope(near, near, positions, inv_freq), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
