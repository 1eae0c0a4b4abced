"""Attention on a GPU: every route against the reference in fp64, bitwise repeats, and no waiting for the device.

Runs without the repository's configuration too (benchmarks/gpu_suite.py): needs torch, triton and pytest only.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swe_rl.ops import attention_flash, attention_with_lse
from swe_rl.ops.attention_ops import attention, attention_backward
from swe_rl.ops.attention_routes import usable_names

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
MASKS = ("document", "documents", "tree", "crossing")


def mask(kind: str, tokens: int) -> Tensor:
    index = torch.arange(tokens)
    if kind == "document":
        ends = torch.full((tokens,), tokens)
    elif kind == "documents":
        ends = ((index // 137 + 1) * 137).clamp(max=tokens)
    elif kind == "tree":
        ends = torch.where(index < tokens // 4, tokens, ((index // 97 + 1) * 97).clamp(max=tokens))
    else:
        ends = index + torch.randint(0, tokens, (tokens,), generator=torch.Generator().manual_seed(1)) % (
            tokens - index + 1
        )
    if kind in ("documents", "tree"):
        tail = tokens - 30
        ends = torch.where(index < tail, ends.clamp(max=tail), index)
    return ends.int().cuda()


def make(tokens: int, shared: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(tokens, h, head_dim) for h in (2 * shared, 2, 2, 2 * shared)]
    return tuple(torch.randn(shape, generator=rng, device="cuda").to(dtype) for shape in shapes)  # type: ignore[return-value]


def results(tensors: tuple[Tensor, ...], kv_end: Tensor, impl: str, **options: bool) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors[:3]]
    out, lse = attention_with_lse(*leaves, kv_end=kv_end, impl=impl, **options)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, tensors[3])]


def check(found: list[Tensor], want: list[Tensor], limit: float) -> None:
    for name, mine, right in zip(("out", "lse", "dq", "dk", "dv"), found, want, strict=True):
        assert torch.equal(mine.isinf(), right.isinf()), name
        mine, right = (t.double().masked_fill(t.isinf(), 0.0) for t in (mine, right))
        error = float((mine - right).abs().max() / right.abs().max().clamp(min=1.0))
        assert error <= limit, f"{name}: {error:.2e} > {limit:g}"


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [*LIMITS])
@pytest.mark.parametrize(("tokens", "shared", "head_dim"), [(1, 1, 64), (129, 4, 64), (1000, 8, 128), (777, 1, 80)])
def test_our_kernels(tokens: int, shared: int, head_dim: int, dtype: torch.dtype, kind: str) -> None:
    kv_end, tensors = (
        mask(kind, tokens) if tokens > 1 else torch.ones(1, dtype=torch.int32).cuda(),
        make(tokens, shared, head_dim, dtype),
    )
    want = results(tuple(t.double() for t in tensors), kv_end, "reference")
    check(results(tensors, kv_end, "triton"), want, LIMITS[dtype])
    check(results(tensors, kv_end, "triton", deterministic=False), want, LIMITS[dtype])


ROUTES = [(name, kind) for name in attention_flash.KERNELS for kind in MASKS if kind != "crossing"]  # runs that nest


@pytest.mark.parametrize(("name", "kind"), [*ROUTES, *(("auto", kind) for kind in MASKS)])
def test_each_route_gives_the_same(name: str, kind: str) -> None:
    kv_end, tensors = mask(kind, 1000), make(1000, 4, 128, torch.bfloat16)
    names, reasons = usable_names(tensors[0].device, torch.bfloat16, 128, deterministic=False)
    if name != "auto" and name not in names:
        pytest.skip(reasons[name])
    want = results(tuple(t.double() for t in tensors), kv_end, "reference")
    q, k, v, grad = tensors
    out, lse = attention(q, k, v, kv_end, 128**-0.5, name)
    grads = attention_backward(grad, q, k, v, out, lse, kv_end, 128**-0.5, name)
    check([out, lse, *grads], want, LIMITS[torch.bfloat16])


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("kind", ["documents", "tree"])
def test_a_hundred_repeats_are_bitwise_equal(kind: str, impl: str) -> None:
    kv_end, tensors = mask(kind, 1000), make(1000, 4, 128, torch.bfloat16)
    first = results(tensors, kv_end, impl)
    for _ in range(99):
        assert all(map(torch.equal, results(tensors, kv_end, impl), first))


def test_a_hundred_repeats_of_torchs_kernel_are_bitwise_equal_where_the_process_says_so() -> None:
    kv_end, (q, k, v, grad) = mask("tree", 1000), make(1000, 4, 128, torch.bfloat16)
    names, reasons = usable_names(q.device, torch.bfloat16, 128, deterministic=False)
    if "torch_flash" not in names:
        pytest.skip(reasons["torch_flash"])
    out, lse = attention(q, k, v, kv_end, 128**-0.5, "torch_flash")
    torch.use_deterministic_algorithms(True)
    try:
        first = attention_backward(grad, q, k, v, out, lse, kv_end, 128**-0.5, "torch_flash")
        for _ in range(99):
            again = attention_backward(grad, q, k, v, out, lse, kv_end, 128**-0.5, "torch_flash")
            assert all(map(torch.equal, again, first))
    finally:
        torch.use_deterministic_algorithms(False)


def test_padding_that_holds_nan_does_not_reach_what_is_seen() -> None:
    kv_end, tensors = mask("tree", 1000), make(1000, 4, 128, torch.bfloat16)
    want = results(tensors, kv_end, "triton")
    dirty = tuple(t.index_fill(0, torch.arange(970, 1000).cuda(), torch.nan) for t in tensors)
    for name in ("triton", "auto"):
        check(results(dirty, kv_end, name), want, LIMITS[torch.bfloat16])


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_nothing_waits_for_the_device(impl: str) -> None:
    kv_end, tensors = mask("tree", 1000), make(1000, 4, 128, torch.bfloat16)
    results(tensors, kv_end, impl)  # compiles, and reads the mask once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(tensors, kv_end, impl)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_elements_than_32_bits_count() -> None:
    tokens, heads = 140_000, 128  # 2.3e9 elements of q, in documents of 100
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of device memory")
    index = torch.arange(tokens)
    kv_end = ((index // 100 + 1) * 100).int().cuda()
    q = torch.randn(tokens, heads, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(tokens, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, lse = attention(q, k, v, kv_end, 128**-0.5, "triton")
    last = slice(tokens - 100, tokens)
    want, norm = attention_with_lse(q[last], k[last], v[last], kv_end=kv_end[last] - (tokens - 100), impl="reference")
    check([out[last], lse[:, last]] + [torch.zeros(1).cuda()] * 3, [want, norm] + [torch.zeros(1).cuda()] * 3, 1.6e-2)
