"""Attention on the CPU: values and gradients against a plain softmax per row in fp64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
from torch.utils.checkpoint import checkpoint

from swe_rl.ops import attention, attention_mask, attention_with_lse
from swe_rl.ops.attention_ops import FIRST_ORDER, attention_backward
from swe_rl.ops.attention_ops import attention as attention_op

IMPLS = ("reference", "cpu")
LENGTHS = (1, 17, 129, 1000)


def masks(tokens: int) -> dict[str, Tensor]:
    """Of `tokens` keys each."""
    padding = min(5, tokens - 1)
    third = (tokens - padding) // 3
    lengths = [length for length in (third, tokens - padding - third - third // 2, third // 2) if length]
    return {
        "one document": packed(tokens),
        "documents and padding": packed(*lengths, padding=padding),
        "forest": random_forest(tokens, tokens, padding=padding)[0],
    }


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shared", [1, 4, 8])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_values_and_gradients(tokens: int, shared: int, impl: str) -> None:
    for name, kv_end in masks(tokens).items():
        if tokens == 1000 and (shared, name) not in ((1, "forest"), (4, "documents and padding"), (8, "forest")):
            continue
        tensors = make(tokens, 2 * shared, 2, 16)
        check(results(attention_with_lse, tensors, kv_end, impl=impl), exact(tensors, kv_end))


def plan_by(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU's plan by runs or by blocks, whichever costs less."""
    wanted = attention_mask.run_tiles if plan == "runs" else attention_mask.block_tiles
    monkeypatch.setattr(
        "swe_rl.ops.attention_facts.plan",
        lambda ends: list(wanted(attention_mask.runs(ends) if plan == "runs" else ends)),
    )


@pytest.mark.parametrize("plan", ["runs", "blocks"])
@pytest.mark.parametrize("seed", range(12))
def test_each_plan_gives_the_same(seed: int, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mask, "BLOCK_ROWS", 32)
    kv_end = crossing(150, seed) if seed % 3 == 2 else random_forest(150, seed, padding=seed)[0]
    plan_by(plan, monkeypatch)
    tensors = make(150, 4, 2, 24, seed=seed)
    check(results(attention_with_lse, tensors, kv_end), exact(tensors, kv_end))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, impl: str) -> None:
    for kv_end in masks(129).values():
        tensors = make(129, 4, 2, 32, dtype=dtype)
        found = results(attention_with_lse, tensors, kv_end, impl=impl)
        assert [t.dtype for t in found] == [dtype, torch.promote_types(dtype, torch.float32), dtype, dtype, dtype]
        limit = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float64: 1e-13}[dtype]
        check(found, exact(tensors, kv_end), limit=limit)


@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("route", ["reference", "runs", "blocks"])
def test_padding_is_zero_whatever_it_holds(route: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kv_end, tensors = padded(kind), make(150, 4, 2, 16)
    dirty, blind, unseen = poisoned(tensors, kv_end)
    if route != "reference":
        monkeypatch.setattr(attention_mask, "BLOCK_ROWS", 32)
        plan_by(route, monkeypatch)
    found = results(attention_with_lse, dirty, kv_end, impl="reference" if route == "reference" else "cpu")
    check_padding(found, exact(tensors, kv_end), blind, unseen)


def test_only_padding_and_nothing_at_all() -> None:
    for tokens in (3, 0):
        kv_end = torch.arange(tokens, dtype=torch.int32)
        out, lse, *grads = results(attention_with_lse, make(tokens, 2, 1, 8), kv_end)
        assert out.shape == (tokens, 2, 8)
        assert not out.any()
        assert (lse == -torch.inf).all()
        assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("tokens", [129, 1000])
def test_repeats_are_bitwise_equal(tokens: int) -> None:
    tensors = make(tokens, 8, 2, 16)
    for kv_end in masks(tokens).values():
        first = results(attention_with_lse, tensors, kv_end)
        for _ in range(3):
            assert all(map(torch.equal, results(attention_with_lse, tensors, kv_end.clone()), first))


def test_a_document_is_the_same_alone_and_among_others() -> None:
    lengths = (40, 300, 1, 90)
    kv_end = packed(*lengths, padding=3)
    tensors = make(len(kv_end), 4, 2, 32)
    whole = results(attention_with_lse, tensors, kv_end)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = results(attention_with_lse, tuple(t[part] for t in tensors), packed(length))
        assert torch.equal(alone[1], whole[1][:, part])
        for mine, all_rows in zip((alone[0], *alone[2:]), (whole[0], *whole[2:]), strict=True):
            assert torch.equal(mine, all_rows[part])
        start += length


@pytest.mark.parametrize("impl", IMPLS)
def test_scale_and_large_scores(impl: str) -> None:
    kv_end = random_forest(80, 5)[0]
    q, k, v, grad = make(80, 2, 2, 16)
    for scale, tensors in ((0.5, (q, k, v, grad)), (1.0, (15 * q, 15 * k, v, grad))):
        want = exact(tensors, kv_end, scale=scale)
        limit = 1e-5 if scale < 1 else 1e-3  # scores of 900 have an error of 1e-4 themselves
        check(results(attention_with_lse, tensors, kv_end, impl=impl, scale=scale), want, limit=limit)


def test_a_tree_of_paths_is_the_sum_over_paths() -> None:
    prompt, answers = 40, (25, 60, 1)
    ends = [prompt + sum(answers)] * prompt
    for length in answers:
        ends += [len(ends) + length] * length
    kv_end = torch.tensor(ends, dtype=torch.int32)
    tensors = make(len(kv_end), 4, 2, 16, dtype=torch.float64)
    out, _, *grads = results(attention_with_lse, tensors, kv_end)
    total = [torch.zeros_like(grad) for grad in grads]
    start = prompt
    for number, length in enumerate(answers):
        path = torch.cat([torch.arange(prompt), torch.arange(start, start + length)])
        q, k, v, grad = (t[path] for t in tensors)
        if number:
            grad = grad.clone()
            grad[:prompt] = 0  # rows of the prompt count once
        mine = results(attention_with_lse, (q, k, v, grad), packed(len(path)))
        torch.testing.assert_close(mine[0][prompt:], out[start : start + length])
        for whole, part in zip(total, mine[2:], strict=True):
            whole[path] += part
        start += length
    torch.testing.assert_close(total, grads)


def test_strided_inputs_and_gradients() -> None:
    kv_end = masks(129)["forest"]
    wide = torch.randn(2, 8, 129, 3, 16)
    q, k, v = (wide[0, :heads, :, part].transpose(0, 1) for part, heads in enumerate((8, 2, 2)))
    grad = torch.randn(129, 16, 8).transpose(1, 2)
    assert not any(t.is_contiguous() for t in (q, k, v, grad))
    want = exact(tuple(t.contiguous() for t in (q, k, v, grad)), kv_end)
    check(results(attention_with_lse, (q, k, v, grad), kv_end), want)
    constant = torch.randn(129, 8, 1).expand(-1, -1, 16)
    check(results(attention_with_lse, (q, k, v, constant), kv_end), exact((q, k, v, constant), kv_end))
    turned = torch.randn(129, 16, 8).transpose(1, 2)
    check(results(attention_with_lse, (turned, k, v, grad), kv_end), exact((turned, k, v, grad), kv_end))


def test_gradcheck() -> None:
    kv_end = torch.tensor([9, 9, 5, 5, 5, 9, 8, 8, 9, 9], dtype=torch.int32)
    leaves = [t.requires_grad_() for t in make(10, 4, 2, 3, dtype=torch.float64)[:3]]
    for impl in IMPLS:
        assert torch.autograd.gradcheck(lambda *x, impl=impl: attention(*x, kv_end=kv_end, impl=impl), leaves)


def test_inputs_that_need_no_gradient_and_are_not_written() -> None:
    kv_end = masks(129)["forest"]
    q, k, v, grad = make(129, 4, 2, 16)
    copies = [t.clone() for t in (q, k, v, grad, kv_end)]
    want = exact((q, k, v, grad), kv_end)
    v.requires_grad_()
    out, lse = attention_with_lse(q, k, v, kv_end=kv_end)
    assert not lse.requires_grad
    out.backward(grad)
    assert q.grad is None
    assert v.grad is not None
    torch.testing.assert_close(v.grad.double(), want[4], rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, (q, k, v, grad, kv_end), copies))


def test_second_derivatives_are_refused() -> None:
    leaves = [t.requires_grad_() for t in make(5, 1, 1, 4)[:3]]
    out = attention(*leaves, kv_end=packed(5))
    with pytest.raises(RuntimeError, match=FIRST_ORDER[:40]):
        torch.autograd.grad(out.sum(), leaves, create_graph=True)


def test_recomputation_gives_the_same_bits() -> None:
    kv_end = masks(129)["forest"]
    tensors = make(129, 4, 2, 16)
    want = results(attention_with_lse, tensors, kv_end)
    leaves = [t.clone().requires_grad_() for t in tensors[:3]]
    out = checkpoint(lambda *x: attention(*x, kv_end=kv_end), *leaves, use_reentrant=False)
    found = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]
    assert all(map(torch.equal, found, [want[0], *want[2:]]))


def test_operators_say_what_they_return() -> None:
    kv_end = masks(17)["forest"]
    q, k, v, grad = make(17, 4, 2, 8, dtype=torch.bfloat16)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(attention_op, (*leaves, kv_end, 0.3, "cpu"), test_utils=checks)
    out, lse = attention_with_lse(q, k, v, kv_end=kv_end, scale=0.3)
    torch.library.opcheck(attention_backward, (grad, q, k, v, out, lse, kv_end, 0.3, "cpu"), test_utils=checks[::2])


def test_a_compiled_model_sees_one_operator() -> None:
    kv_end = masks(129)["forest"]
    tensors = make(129, 4, 2, 16)
    compiled = torch.compile(attention_with_lse, backend="aot_eager", fullgraph=True)
    found, want = (results(call, tensors, kv_end) for call in (compiled, attention_with_lse))
    assert all(map(torch.equal, found, want))


MEASURE = """
import torch
from pathlib import Path
from swe_rl.ops import attention

def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

for tokens in (64, 4096, 16384):
    q, k, v = (torch.randn(tokens, heads, 16, requires_grad=True) for heads in (2, 1, 1))
    grad, kv_end = torch.randn(tokens, 2, 16), torch.full((tokens,), tokens, dtype=torch.int32)
    kv_end[tokens // 4 : tokens // 2] = tokens // 2
    Path("/proc/self/clear_refs").write_text("5")
    base = kib("VmRSS")
    attention(q, k, v, kv_end=kv_end).backward(grad)
    print(kib("VmHWM") - base)
"""


def test_memory_is_linear_in_tokens() -> None:
    """One [16384, 16384] matrix would be 1 GiB in fp32, or 256 MiB of flags."""
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    peaks_kib = [int(line) for line in done.stdout.split()]
    assert peaks_kib[2] < 64 * 1024
