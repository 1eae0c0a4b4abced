"""The head on a real GPU: accuracy against fp64, repeatability, no waiting for the device, sizes beyond 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swe_rl.ops import linear_logprob, linear_policy_loss, reference, row_stats, triton_rows

# The skip is repeated here for runs with --noconftest, on machines that have nothing but torch, Triton and pytest.
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SHAPES = [(1, 64, 7), (300, 512, 1000), (517, 896, 4099), (1025, 1024, 151936)]  # rows, hidden size, vocabulary


def make(rows: int, size: int, vocab: int, *, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator("cuda").manual_seed(rows)
    hidden = torch.randn(rows, size, generator=rng, device="cuda").to(dtype)
    weight = (torch.randn(vocab, size, generator=rng, device="cuda") * 2 / size**0.5).to(dtype)
    return hidden, weight, torch.randint(0, vocab, (rows,), generator=rng, device="cuda")


def arguments(rows: int) -> dict[str, Any]:
    """Everything but hidden, weight and labels: a fifth of the tokens trained, a temperature per token."""
    rng = torch.Generator("cuda").manual_seed(1)
    draw = torch.rand(4, rows, generator=rng, device="cuda")
    loss_mask = draw[0] < 0.2
    loss_mask[0] = True
    return {
        "advantages": draw[1] - 0.5,
        "loss_mask": loss_mask,
        "token_weights": torch.full((rows,), 1.0 / rows, device="cuda"),
        "temperature": draw[2] + 0.6,
        "entropy_coeff": 0.01,
    }


def relative(found: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    return ((found.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300)).item()


def loss_and_grads(hidden: Tensor, weight: Tensor, labels: Tensor, impl: str, **rest: Any) -> tuple[Tensor, ...]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss, stats = linear_policy_loss(hidden, weight, labels, impl=impl, **rest)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), stats["logprobs"], stats["entropy"], hidden.grad, weight.grad


@pytest.mark.parametrize(("rows", "size", "vocab"), SHAPES)
def test_training_in_bf16_against_fp64(rows: int, size: int, vocab: int) -> None:
    hidden, weight, labels = make(rows, size, vocab)
    rest = arguments(rows)
    found = loss_and_grads(hidden, weight, labels, "triton", **rest)
    want = loss_and_grads(hidden.double(), weight.double(), labels, "reference", **rest)
    for ours, right in zip(found[:3], want[:3], strict=True):  # fp32 throughout: logits are never rounded to bf16
        torch.testing.assert_close(ours.double(), right.double(), rtol=1e-5, atol=1e-5)
    for ours, right in zip(found[3:], want[3:], strict=True):  # dlogits and the result are rounded to bf16 once each
        assert relative(ours, right) < 2 * 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_training_in_fp32_and_fp16_against_fp64(dtype: torch.dtype) -> None:
    hidden, weight, labels = make(130, 256, 4099, dtype=dtype)
    rest = arguments(130)
    found = loss_and_grads(hidden, weight, labels, "triton", **rest)
    want = loss_and_grads(hidden.double(), weight.double(), labels, "reference", **rest)
    for ours, right in zip(found, want, strict=True):
        assert relative(ours, right) < (1e-5 if ours.dtype == torch.float32 else 2**-10)


@pytest.mark.parametrize(("rows", "size", "vocab"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_against_fp64(rows: int, size: int, vocab: int, dtype: torch.dtype) -> None:
    hidden, weight, labels = make(rows, size, vocab, dtype=dtype)
    temperature = arguments(rows)["temperature"]
    with torch.no_grad():
        found = linear_logprob(hidden, weight, labels, temperature=temperature, impl="triton")
        want = linear_logprob(hidden.double(), weight.double(), labels, temperature=temperature, impl="reference")
    for ours, right in zip(found, want, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-5)
    assert (found[0] <= 0).all()
    assert (found[1] >= 0).all()


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_softcap_padding_and_shards_merge(softcap: float) -> None:
    hidden, weight, labels = make(70, 128, 1024)
    inv_t = torch.ones(70, device="cuda")
    labels = labels.clamp(max=999)
    shards = []
    for rank, shard in enumerate(weight.chunk(4)):
        first = rank * 256
        local = torch.where((labels >= first) & (labels < first + 256), labels - first, -1)
        rules = {"softcap": softcap, "num_valid": min(256, 1000 - first)}
        logits = triton_rows.matmul_logits(hidden, shard, torch.empty(70, 256, device="cuda"))
        by_row = triton_rows.row_stats(logits, local, inv_t, **rules)
        streamed = row_stats.merge(triton_rows.streaming_stats(hidden, shard, local, inv_t, **rules))
        torch.testing.assert_close(by_row, streamed, rtol=2e-5, atol=2e-5)
        shards.append(by_row)
    merged = row_stats.merge(torch.stack(shards))
    want = reference.outputs(
        hidden.double(), weight.double(), labels, temperature=inv_t.double(), softcap=softcap, vocab_size=1000
    )
    torch.testing.assert_close(row_stats.logprobs(merged).double(), want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row_stats.entropy(merged).double(), want[1], rtol=1e-5, atol=1e-5)


def test_a_hundred_repeats_are_bitwise_equal() -> None:
    hidden, weight, labels = make(517, 896, 32003)
    rest = arguments(517)
    first = loss_and_grads(hidden, weight, labels, "triton", **rest)
    with torch.no_grad():
        scores = linear_logprob(hidden, weight, labels, impl="triton")
    for _ in range(99):
        for again, before in zip(loss_and_grads(hidden, weight, labels, "triton", **rest), first, strict=True):
            assert torch.equal(again, before)
        with torch.no_grad():
            assert all(map(torch.equal, linear_logprob(hidden, weight, labels, impl="triton"), scores))


def test_a_score_does_not_depend_on_its_neighbours() -> None:
    hidden, weight, labels = make(1000, 512, 32003)
    with torch.no_grad():
        logprobs, entropy = linear_logprob(hidden, weight, labels, impl="triton")
        for part in (slice(0, 1), slice(100, 700), slice(999, 1000)):
            alone = linear_logprob(hidden[part], weight, labels[part], impl="triton")
            assert torch.equal(alone[0], logprobs[part])
            assert torch.equal(alone[1], entropy[part])


def test_nothing_waits_for_the_device() -> None:
    hidden, weight, labels = make(517, 896, 4099)
    rest = arguments(517)
    rest["trained_rows"] = rest["loss_mask"].nonzero()[:, 0]
    loss_and_grads(hidden, weight, labels, "triton", **rest)  # compiles
    with torch.no_grad():
        linear_logprob(hidden, weight, labels, impl="triton")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_and_grads(hidden, weight, labels, "triton", **rest)
        with torch.no_grad():
            linear_logprob(hidden, weight, labels, impl="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_inputs_are_not_written() -> None:
    hidden, weight, labels = make(300, 512, 4099)
    rest = arguments(300)
    copies = [t.clone() for t in (hidden, weight, labels, *(v for v in rest.values() if isinstance(v, Tensor)))]
    loss_and_grads(hidden, weight, labels, "triton", **rest)
    now = [hidden, weight, labels, *(v for v in rest.values() if isinstance(v, Tensor))]
    assert all(map(torch.equal, copies, now))


def test_more_rows_than_a_second_grid_dimension_has() -> None:
    hidden, weight, labels = make(70_001, 64, 130)
    inv_t = torch.ones(70_001, device="cuda")
    logits = triton_rows.matmul_logits(hidden, weight, torch.empty(70_001, 130, device="cuda"))
    stats = triton_rows.row_stats(logits, labels, inv_t, num_valid=130)
    want = torch.log_softmax(hidden.double() @ weight.double().T, dim=1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(row_stats.logprobs(stats).double(), want, rtol=1e-5, atol=1e-5)
    streamed = row_stats.merge(triton_rows.streaming_stats(hidden, weight, labels, inv_t, num_valid=130))
    torch.testing.assert_close(row_stats.logprobs(streamed).double(), want, rtol=1e-5, atol=1e-5)


def test_more_logits_than_32_bits_count() -> None:
    rows, vocab = 15_000, 151_936  # 2.3e9 logits, 9.1 GB
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GB of device memory")
    logits = torch.zeros(rows, vocab, device="cuda")
    labels = torch.full((rows,), vocab - 1, device="cuda")
    inv_t = torch.ones(rows, device="cuda")
    logits[-1, -1] = 20.0
    stats = triton_rows.row_stats(logits, labels, inv_t, num_valid=vocab)
    want = torch.log_softmax(logits[-2:].double(), dim=1)
    torch.testing.assert_close(row_stats.logprobs(stats[-2:]).double(), want[:, -1], rtol=1e-5, atol=1e-5)
    one, none = torch.ones(rows, device="cuda"), torch.zeros(rows, device="cuda")
    slopes = row_stats.slopes(stats, one, none, none)
    triton_rows.row_grad(logits, labels, inv_t, slopes, num_valid=vocab, out=logits)
    right = -want.exp()
    right[:, -1] += 1
    torch.testing.assert_close(logits[-2:, :-1].double(), right[:, :-1], rtol=1e-5, atol=0)
    torch.testing.assert_close(logits[-2:, -1].double(), right[:, -1], rtol=0, atol=1e-6)  # 1 - p, p in fp32
