"""Values of the Triton head kernels against fp64, on CPU tensors. Collected by test_triton_interpreter.py only, in a
process with TRITON_INTERPRET=1: whether a kernel is interpreted is settled when it is decorated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swe_rl.ops import linear_logprob, linear_policy_loss, row_stats, triton_rows

VOCABULARIES = (7, 1000, 4099)  # below a tile, whole vectors but a ragged tile, odd
SOFTCAPS = (0.0, 3.0)


def wide_z(logits: Tensor, inv_temperature: Tensor, *, softcap: float, num_valid: int) -> Tensor:
    """The definition in fp64: scaled, capped logits; padding is -inf."""
    z = logits.double()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    z = z * inv_temperature.double()[:, None]
    return torch.where(torch.arange(z.shape[1]) < num_valid, z, -torch.inf)


def wide_stats(z: Tensor, labels: Tensor) -> Tensor:
    top = z.amax(dim=1)
    below = z - torch.where(top > -torch.inf, top, 0.0)[:, None]
    e = below.exp()
    weighted = torch.where(e > 0, e * below, 0.0).sum(dim=1)
    at_label = torch.where(labels >= 0, z.gather(1, labels.clamp(min=0)[:, None])[:, 0], -torch.inf)
    return torch.stack([top, e.sum(dim=1), weighted, e.square().sum(dim=1), at_label], dim=1)


def check_stats(found: Tensor, z: Tensor, labels: Tensor, *, rtol: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), wide_stats(z, labels), rtol=rtol, atol=1e-6)


def make(rows: int, vocab: int, *, seed: int = 0, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, labels with some -1, inverse temperatures that differ per row)."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=rng) * spread
    labels = torch.randint(-1, vocab, (rows,), generator=rng)
    labels[0] = -1
    return logits, labels, torch.rand(rows, generator=rng) + 0.6


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("share_valid", [1.0, 0.7, 0.0])
def test_row_stats(vocab: int, softcap: float, share_valid: float) -> None:
    logits, labels, inv_t = make(11, vocab)
    rules = {"softcap": softcap, "num_valid": int(vocab * share_valid)}
    labels = labels.clamp(max=rules["num_valid"] - 1)
    before = logits.clone()
    found = triton_rows.row_stats(logits, labels, inv_t, **rules)
    check_stats(found, wide_z(logits, inv_t, **rules), labels)
    assert torch.equal(found, triton_rows.row_stats(logits, labels, inv_t, **rules))
    assert torch.equal(logits, before)
    if vocab * share_valid == 0:
        assert torch.equal(found, torch.tensor([-torch.inf, 0, 0, 0, -torch.inf]).expand(11, 5))


@pytest.mark.parametrize("offset", [-1e4, -150.0, 1e4])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_row_stats_of_shifted_and_peaked_rows(vocab: int, offset: float) -> None:
    logits, labels, _ = make(5, vocab, spread=1.0)
    logits[1, vocab - 1] = 30.0  # a peak in the ragged tile, one in the first column, and one row of equal logits
    logits[2, 0] = 90.0
    logits[3] = 0.0
    logits = (logits + offset).contiguous()
    labels[1], labels[2] = vocab - 1, 0
    inv_t = torch.ones(5)
    found = triton_rows.row_stats(logits, labels, inv_t, num_valid=vocab)
    check_stats(found, wide_z(logits, inv_t, softcap=0.0, num_valid=vocab), labels)
    logprobs = row_stats.logprobs(found)
    assert (logprobs <= 0).all()
    assert (row_stats.entropy(found) >= 0).all()


@pytest.mark.parametrize("inverse", [1 / 0.6, 1.0, 0.1])
def test_a_certain_token_has_logprob_zero_at_any_scale(inverse: float) -> None:
    logits = torch.full((3, 4099), -1e4)
    labels = torch.tensor([0, 4098, 2048])
    logits[torch.arange(3), labels] = torch.tensor([1e4, 3.3333, -1.7e3])
    found = triton_rows.row_stats(logits, labels, torch.full((3,), inverse), num_valid=4099)
    assert torch.equal(row_stats.logprobs(found), torch.zeros(3))
    assert torch.equal(row_stats.entropy(found), torch.zeros(3))


def wide_grad(
    logits: Tensor, labels: Tensor, inv_t: Tensor, slopes: Tensor, *, softcap: float, num_valid: int
) -> Tensor:
    z = wide_z(logits, inv_t, softcap=softcap, num_valid=num_valid)
    top, log_sum, at_label, c0, c1 = (column[:, None] for column in slopes.double().unbind(1))
    logp = z - top - log_sum
    p = logp.exp()
    grad = torch.where(p > 0, p * (c0 + c1 * logp), 0.0)
    grad += torch.where(torch.arange(z.shape[1]) == labels[:, None], at_label, 0.0)
    slope = 1 - torch.tanh(logits.double() / softcap) ** 2 if softcap else 1.0
    grad = grad * inv_t.double()[:, None] * slope
    return torch.where(torch.arange(z.shape[1]) < num_valid, grad, 0.0)


def make_slopes(logits: Tensor, labels: Tensor, inv_t: Tensor, **rules: float) -> Tensor:
    stats = wide_stats(wide_z(logits, inv_t, **rules), labels).float()
    rng = torch.Generator().manual_seed(5)
    d_logprob, d_entropy, d_normalizer = torch.randn(3, len(logits), generator=rng)
    return row_stats.slopes(stats, d_logprob, d_entropy, d_normalizer)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("share_valid", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_row_grad(vocab: int, softcap: float, share_valid: float, dtype: torch.dtype) -> None:
    logits, labels, inv_t = make(6, vocab)
    rules = {"softcap": softcap, "num_valid": int(vocab * share_valid)}
    labels = labels.clamp(max=rules["num_valid"] - 1)
    slopes = make_slopes(logits, labels, inv_t, **rules)
    want = wide_grad(logits, labels, inv_t, slopes, **rules)
    room = torch.full((6, vocab + 3), torch.nan, dtype=dtype)
    before = logits.clone()
    assert triton_rows.row_grad(logits, labels, inv_t, slopes, out=room[:, :vocab], **rules) is not None
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 1e-6}
    torch.testing.assert_close(room[:, :vocab].double(), want, **tolerance)
    assert room[:, vocab:].isnan().all()  # nothing beyond the row is written
    assert torch.equal(logits, before)
    if dtype == torch.float32:
        in_place = triton_rows.row_grad(logits, labels, inv_t, slopes, out=logits, **rules)
        assert in_place.data_ptr() == logits.data_ptr()
        assert torch.equal(logits, room[:, :vocab])


def test_row_grad_of_a_shard_without_valid_columns_is_zero() -> None:
    logits, labels, inv_t = make(3, 1000)
    slopes = torch.randn(3, 5)
    out = torch.full_like(logits, torch.nan)
    triton_rows.row_grad(logits, torch.full_like(labels, -1), inv_t, slopes, num_valid=0, out=out)
    assert not out.any()


def test_underflow_is_zero_and_nan_stays_visible() -> None:
    logits = torch.zeros(2, 1000)
    logits[0, 1:] = -1e30
    logits[1, 17] = torch.nan
    labels, inv_t = torch.tensor([0, 3]), torch.ones(2)
    slopes = torch.tensor([[0.0, 0.0, 1.0, -1.0, 2.0]]).repeat(2, 1)
    out = triton_rows.row_grad(logits, labels, inv_t, slopes, num_valid=1000, out=torch.empty_like(logits))
    assert not out[0].any()
    assert out[1].isnan().sum() == 1
    assert triton_rows.row_stats(logits, labels, inv_t, num_valid=1000)[1, 1:4].isnan().all()


@pytest.mark.parametrize(
    ("rows", "hidden_size", "vocab", "dtype", "softcap", "share_valid"),
    [
        (3, 8, 7, torch.float32, 0.0, 1.0),
        (3, 8, 7, torch.float32, 3.0, 0.6),
        (70, 33, 1000, torch.float32, 0.0, 1.0),
        (70, 33, 1000, torch.float32, 3.0, 0.6),
        (70, 33, 1000, torch.float32, 0.0, 0.0),
        (259, 40, 1000, torch.float16, 0.0, 1.0),
        (259, 40, 1000, torch.float16, 3.0, 0.6),
        (259, 64, 1000, torch.float16, 0.0, 0.0),
        (1, 64, 4099, torch.float16, 0.0, 1.0),
    ],
)
def test_streaming_stats(
    rows: int, hidden_size: int, vocab: int, dtype: torch.dtype, softcap: float, share_valid: float
) -> None:
    rng = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, hidden_size, generator=rng).to(dtype)
    weight = (torch.randn(vocab, hidden_size, generator=rng) * 0.3).to(dtype)
    _, labels, inv_t = make(rows, vocab)
    rules = {"softcap": softcap, "num_valid": int(vocab * share_valid)}
    labels = labels.clamp(max=rules["num_valid"] - 1)
    parts = triton_rows.streaming_stats(hidden, weight, labels, inv_t, **rules)
    assert parts.shape[1:] == (rows, 5)
    found = row_stats.merge(parts)
    z = wide_z(hidden.double() @ weight.double().T, inv_t, **rules)
    if share_valid:
        check_stats(found, z, labels, rtol=1e-5)
    else:
        assert torch.equal(found[:, 0], torch.full((rows,), -torch.inf))
        assert not found[:, 1:4].any()
    assert torch.equal(parts, triton_rows.streaming_stats(hidden, weight, labels, inv_t, **rules))


def test_streaming_stats_of_a_row_do_not_depend_on_its_neighbours() -> None:
    """Of values whose products are exact: numpy's, which the interpreter uses, may round by the place of a row."""
    rng = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randint(-16, 17, (rows, 16), generator=rng) / 16 for rows in (150, 500))
    _, labels, inv_t = make(150, 500)
    whole = triton_rows.streaming_stats(hidden, weight, labels, inv_t, num_valid=500)
    for part in (slice(0, 1), slice(65, 140), slice(149, 150)):
        alone = triton_rows.streaming_stats(hidden[part], weight, labels[part], inv_t[part], num_valid=500)
        assert torch.equal(alone, whole[:, part])


@pytest.mark.parametrize("offset", [-1e4, -150.0, 1e4])
def test_streaming_stats_of_shifted_logits(offset: float) -> None:
    rng = torch.Generator().manual_seed(6)
    hidden, weight = torch.randn(5, 16, generator=rng), torch.randn(1000, 16, generator=rng)
    hidden[:, 0], weight[:, 0] = 1.0, offset
    _, labels, _ = make(5, 1000)
    inv_t = torch.ones(5)
    found = row_stats.merge(triton_rows.streaming_stats(hidden, weight, labels, inv_t, num_valid=1000))
    z = wide_z(hidden.double() @ weight.double().T, inv_t, softcap=0.0, num_valid=1000)
    ulp = torch.finfo(torch.float32).eps * 2 ** torch.tensor(abs(offset)).log2().floor()
    torch.testing.assert_close(found.double(), wide_stats(z, labels), rtol=4 * ulp.item(), atol=4 * ulp.item())


def far_rows(rows: int, columns: int, stride: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns] whose rows are so far apart that 32-bit offsets overflow; untouched pages cost nothing."""
    return torch.empty((rows - 1) * stride + columns, dtype=dtype).as_strided((rows, columns), (stride, 1))


def test_row_offsets_are_64_bit() -> None:
    logits, labels, inv_t = make(3, 1000)
    far = far_rows(3, 1000, (1 << 30) + 16, torch.float32)
    far.copy_(logits)
    slopes = make_slopes(logits, labels, inv_t, softcap=0.0, num_valid=1000)
    near_stats = triton_rows.row_stats(logits, labels, inv_t, num_valid=1000)
    assert torch.equal(triton_rows.row_stats(far, labels, inv_t, num_valid=1000), near_stats)
    near_grad = triton_rows.row_grad(logits, labels, inv_t, slopes, num_valid=1000, out=torch.empty_like(logits))
    assert torch.equal(triton_rows.row_grad(far, labels, inv_t, slopes, num_valid=1000, out=far), near_grad)


def test_streaming_offsets_are_64_bit() -> None:
    rng = torch.Generator().manual_seed(7)
    weight = torch.randn(1000, 16, generator=rng).half()
    hidden = torch.randn(600, 16, generator=rng).half()
    _, labels, inv_t = make(600, 1000)
    near = triton_rows.streaming_stats(hidden, weight, labels, inv_t, num_valid=1000)
    far_weight = far_rows(1000, 16, 1 << 22, torch.float16)
    far_weight.copy_(weight)
    assert torch.equal(triton_rows.streaming_stats(hidden, far_weight, labels, inv_t, num_valid=1000), near)
    del far_weight
    far_hidden = far_rows(600, 16, (1 << 22) + 8, torch.float16)
    far_hidden.copy_(hidden)
    assert torch.equal(triton_rows.streaming_stats(far_hidden, weight, labels, inv_t, num_valid=1000), near)


@pytest.mark.slow
def test_a_real_vocabulary() -> None:
    vocab = 49152
    logits, labels, inv_t = make(3, vocab)
    found = triton_rows.row_stats(logits, labels, inv_t, num_valid=vocab)
    check_stats(found, wide_z(logits, inv_t, softcap=0.0, num_valid=vocab), labels)
    slopes = make_slopes(logits, labels, inv_t, softcap=0.0, num_valid=vocab)
    want = wide_grad(logits, labels, inv_t, slopes, softcap=0.0, num_valid=vocab)
    grad = triton_rows.row_grad(logits, labels, inv_t, slopes, num_valid=vocab, out=torch.empty_like(logits))
    torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-8)
    rng = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(3, 64, generator=rng).half(), torch.randn(vocab, 64, generator=rng).half()
    merged = row_stats.merge(triton_rows.streaming_stats(hidden, weight, labels, inv_t, num_valid=vocab))
    z = wide_z(hidden.double() @ weight.double().T, inv_t, softcap=0.0, num_valid=vocab)
    check_stats(merged, z, labels, rtol=1e-5)


def test_matrix_products_are_fp32() -> None:
    rng = torch.Generator().manual_seed(8)
    x, weight = torch.randn(5, 12, generator=rng).half(), torch.randn(9, 12, generator=rng).half()
    logits = triton_rows.matmul_logits(x, weight, torch.empty(5, 9))
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=1e-6, atol=1e-6)
    dlogits = torch.randn(5, 9, generator=rng) * 1e-7  # below the smallest fp16 number
    grad = torch.full((9, 12), torch.nan)
    triton_rows.accumulate_weight_grad(dlogits, x, grad, first=True)
    triton_rows.accumulate_weight_grad(dlogits, x, grad, first=False)
    torch.testing.assert_close(grad.double(), 2 * dlogits.double().T @ x.double(), rtol=1e-5, atol=1e-12)
    full = weight.float()
    out = triton_rows.hidden_grad(dlogits, full, torch.empty(5, 12))
    torch.testing.assert_close(out.double(), dlogits.double() @ full.double(), rtol=1e-5, atol=1e-12)
    narrow = triton_rows.hidden_grad(dlogits * 1e4, weight, torch.empty(5, 12, dtype=torch.float16))
    torch.testing.assert_close(narrow.double(), 1e4 * dlogits.double() @ weight.double(), rtol=2e-3, atol=1e-6)


def test_the_public_operations_run_on_these_kernels() -> None:
    rng = torch.Generator().manual_seed(9)
    hidden, weight = torch.randn(37, 33, generator=rng), torch.randn(300, 33, generator=rng) * 0.3
    labels = torch.randint(0, 300, (37,), generator=rng)
    draw = torch.rand(4, 37, generator=rng)
    columns = {"advantages": draw[0] - 0.5, "loss_mask": draw[1] < 0.4, "token_weights": draw[2] / 37}

    def run(impl: str, dtype: torch.dtype) -> list[Tensor]:
        x, w = (t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight))
        rest = {"temperature": draw[3] + 0.6, "softcap": 4.0, "vocab_size": 290, "impl": impl}
        loss, stats = linear_policy_loss(x, w, labels % 290, entropy_coeff=0.1, **columns, **rest)
        logprobs, entropy = linear_logprob(x, w, labels % 290, **rest)
        (loss + (logprobs * draw[0]).sum() + (entropy * draw[2]).sum()).backward()
        assert x.grad is not None
        assert w.grad is not None
        return [loss, stats["logprobs"], logprobs, entropy, x.grad, w.grad]

    for found, want in zip(run("triton", torch.float32), run("reference", torch.float64), strict=True):
        assert (found.double() - want).norm() <= 1e-5 * want.norm()
