"""The C++ row kernels, in every built vector width, against the formulas in fp64."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real_parts import require
from torch import Tensor

from swe_rl.ops import cpu_rows, row_stats

NAMES = ("default", "v3", "v4")
SIZES = [(1, 1), (3, 7), (5, 64), (4, 127), (3, 1000), (2, 4099)]  # around 4, 8, 16 lanes and blocks of 64 vectors


def runnable() -> tuple[str, ...]:
    """Builds that this machine can run."""
    return (*cpu_rows.LEVELS.get(torch.backends.cpu.get_cpu_capability(), ()), "default")


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Loads one build."""
    build = request.param
    if build not in runnable():
        pytest.skip(f"this machine cannot run {build}")
    path = cpu_rows.LIBRARIES / f"libhead_rows-{build}.so"
    require(path.exists(), str(path.name))
    monkeypatch.setattr(cpu_rows, "_library_path", lambda: path)
    cpu_rows._library.cache_clear()
    yield build
    cpu_rows._library.cache_clear()


def make_rows(rows: int, columns: int, dtype: torch.dtype, *, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, labels, inverse temperatures); the last label is of another shard."""
    generator = torch.Generator().manual_seed(rows * columns)
    logits = spread * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    labels = torch.randint(columns, (rows,), generator=generator)
    labels[-1] = -1
    return logits.to(dtype), labels, torch.linspace(0.6, 1.7, rows, dtype=torch.float64).to(dtype)


def expected_stats(logits: Tensor, labels: Tensor, inv: Tensor, softcap: float, num_valid: int) -> Tensor:
    """[C, 5] in fp64, in the order that ops.row_stats documents."""
    z = logits.double()[:, :num_valid]
    z = (softcap * torch.tanh(z / softcap) if softcap else z) * inv.double()[:, None]
    top = z.amax(dim=1, keepdim=True)
    e = torch.exp(z - top)
    inside = (labels >= 0) & (labels < num_valid)
    at_label = z.gather(1, labels.clamp(0, num_valid - 1)[:, None])[:, 0].where(inside, -math.inf)
    return torch.stack([top[:, 0], e.sum(1), (e * (z - top)).sum(1), (e * e).sum(1), at_label], dim=1)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_statistics(library: str, rows: int, columns: int, softcap: float, dtype: torch.dtype, bound: float) -> None:
    logits, labels, inv = make_rows(rows, columns, dtype)
    for num_valid in {columns, max(columns - 3, 1)}:
        got = cpu_rows.row_stats(logits, labels, inv, softcap=softcap, num_valid=num_valid)
        want = expected_stats(logits, labels, inv, softcap, num_valid)
        torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)


def dlogits_by_autograd(
    logits: Tensor, labels: Tensor, inv: Tensor, softcap: float, num_valid: int, d: Tensor
) -> Tensor:
    """Of d[0] logprob + d[1] entropy + d[2] log_normalizer per row; rows without a label have no logprob."""
    leaf = logits.double().requires_grad_()
    z = (softcap * torch.tanh(leaf / softcap) if softcap else leaf) * inv.double()[:, None]
    logp = torch.log_softmax(z[:, :num_valid], dim=1)
    entropy = -(logp.exp() * logp).sum(1)
    chosen = logp.gather(1, labels.clamp(0, num_valid - 1)[:, None])[:, 0]
    (d[0] * chosen + d[1] * entropy + d[2] * torch.logsumexp(z[:, :num_valid], dim=1)).sum().backward()
    return leaf.grad


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_gradient(library: str, rows: int, columns: int, softcap: float, dtype: torch.dtype, bound: float) -> None:
    logits, labels, inv = make_rows(rows, columns, dtype)
    labels[-1] = 0
    num_valid = max(columns - 2, 1)
    labels %= num_valid
    d = torch.randn(3, rows, dtype=dtype)
    stats = cpu_rows.row_stats(logits, labels, inv, softcap=softcap, num_valid=num_valid)
    slopes = row_stats.slopes(stats, *d)
    out = torch.full_like(logits, math.nan)
    cpu_rows.row_grad(logits, labels, inv, slopes, softcap=softcap, num_valid=num_valid, out=out)
    want = dlogits_by_autograd(logits, labels, inv, softcap, num_valid, d.double())
    assert (out.double() - want).norm() <= bound * d.double().norm(), "of one column everything but d[2] cancels"
    assert not out[:, num_valid:].any()
    cpu_rows.row_grad(logits, labels, inv, slopes, softcap=softcap, num_valid=num_valid, out=logits)
    assert torch.equal(logits, out), "in place"


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.7, 1.3])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("spread", [1.0, 10.0, 1e4])
def test_bounds_of_probability(library: str, spread: float, softcap: float, temperature: float) -> None:
    """logprob <= 0 and 0 <= entropy <= ln V, to the last bit: a scaled logit fused into a subtraction broke both."""
    logits, _, inv = make_rows(200, 50, torch.float32, spread=spread)
    logits[:, 7] += 5 * spread
    inv = torch.full_like(inv, 1 / temperature)
    stats = cpu_rows.row_stats(logits, torch.full((200,), 7), inv, softcap=softcap, num_valid=50)
    assert (row_stats.logprobs(stats) <= 0).all()
    assert (row_stats.entropy(stats) >= 0).all()
    assert (row_stats.entropy(stats) <= math.log(50) * (1 + 2e-7)).all()


@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_common_offset_costs_four_ulp_of_the_largest_logit(library: str, temperature: float, offset: float) -> None:
    logits, labels, _ = make_rows(40, 1000, torch.float32)
    logits += offset
    labels[-1] = 5
    inv = torch.full((40,), 1 / temperature)
    stats = cpu_rows.row_stats(logits, labels, inv, num_valid=1000)
    wide = logits.double() * inv.double()[:, None]
    want = torch.log_softmax(wide, dim=1)
    ulp = 2.0 ** (math.floor(math.log2(float(wide.abs().max()))) - 23)
    error = (row_stats.logprobs(stats).double() - want.gather(1, labels[:, None])[:, 0]).abs()
    assert error.max() <= 4 * ulp
    entropy = -(want.exp() * want).sum(1)
    assert (row_stats.entropy(stats).double() - entropy).abs().max() <= 4 * ulp


def test_dlogits_of_a_row_sum_to_zero_without_the_normalizer(library: str) -> None:
    logits, labels, inv = make_rows(30, 513, torch.float32)
    labels[-1] = 2
    stats = cpu_rows.row_stats(logits, labels, inv, num_valid=513)
    slopes = row_stats.slopes(stats, torch.randn(30), torch.randn(30), torch.zeros(30))
    out = cpu_rows.row_grad(logits, labels, inv, slopes, num_valid=513, out=torch.empty_like(logits))
    assert (out.double().sum(dim=1).abs() <= 2e-6 * out.abs().sum(dim=1)).all()


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_and_infinite_logits(library: str, dtype: torch.dtype, softcap: float) -> None:
    """NaN anywhere spoils its row and no other. One logit of -inf is a token that cannot come."""
    logits, labels, inv = make_rows(6, 70, dtype)
    labels[:] = 1
    logits[0, 5], logits[1, 69], logits[2] = math.nan, math.nan, math.nan
    logits[3, 5], logits[4] = -math.inf, -math.inf
    stats = cpu_rows.row_stats(logits, labels, inv, softcap=softcap, num_valid=70)
    logprobs, entropy = row_stats.logprobs(stats), row_stats.entropy(stats)
    dead = [0, 1, 2] if softcap else [0, 1, 2, 4]  # a cap makes a plain number of -inf
    assert logprobs.isnan().nonzero().flatten().tolist() == dead
    assert entropy.isnan().nonzero().flatten().tolist() == dead
    slopes = row_stats.slopes(stats, *torch.ones(3, 6, dtype=dtype))
    grad = cpu_rows.row_grad(logits, labels, inv, slopes, softcap=softcap, num_valid=70, out=torch.empty_like(logits))
    assert grad.isnan().all(dim=1).nonzero().flatten().tolist() == dead
    if not softcap:
        want = torch.log_softmax(logits[3].double() * inv[3].double(), dim=0)
        assert float(logprobs[3]) == pytest.approx(float(want[1]), rel=1e-6)
        assert grad[3, 5] == 0


def test_a_shard_without_a_possible_token_adds_nothing(library: str) -> None:
    """All padding, or all logits -inf: in a merge with another shard both are absent."""
    logits, labels, inv = make_rows(4, 33, torch.float32)
    whole = cpu_rows.row_stats(logits, labels, inv, num_valid=33)
    nowhere = torch.full((4,), -1)
    padding = cpu_rows.row_stats(logits, nowhere, inv, num_valid=0)
    impossible = cpu_rows.row_stats(torch.full_like(logits, -math.inf), nowhere, inv, num_valid=33)
    for empty in (padding, impossible):
        assert torch.equal(row_stats.merge(torch.stack([empty, whole, empty])), whole)
    grad = cpu_rows.row_grad(logits, nowhere, inv, whole, num_valid=0, out=torch.full_like(logits, math.nan))
    assert not grad.any()


def test_threads_do_not_change_a_bit(library: str) -> None:
    logits, labels, inv = make_rows(7, 1000, torch.float32)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 16):  # 16: more threads than rows
            torch.set_num_threads(threads)
            stats = cpu_rows.row_stats(logits, labels, inv, num_valid=1000)
            slopes = row_stats.slopes(stats, *torch.ones(3, 7))
            results.append((stats, cpu_rows.row_grad(logits, labels, inv, slopes, num_valid=1000, out=logits.clone())))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


def test_no_rows(library: str) -> None:
    empty = cpu_rows.row_stats(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), torch.empty(0), num_valid=9)
    assert empty.shape == (0, 5)


@pytest.mark.parametrize(("rows", "vocab"), [(0, 1000), (1, 151936), (819, 49152), (4096, 151936), (5000, 1000)])
def test_chunks_are_equal_and_bounded(rows: int, vocab: int) -> None:
    size = cpu_rows.chunk_rows(rows, vocab)
    count = -(-rows // size)
    assert size >= 1
    assert count * size - rows < max(count, 1)
    assert size * vocab * 4 <= max(cpu_rows.CHUNK_BYTES, cpu_rows.MIN_ROWS * vocab * 4)


def test_scoring_in_column_blocks_equals_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end inside the padding and blocks that are all padding included."""
    hidden, weight = torch.randn(11, 6, dtype=torch.float64), torch.randn(50, 6, dtype=torch.float64)
    labels, inv = torch.randint(33, (11,)), torch.linspace(0.5, 2, 11, dtype=torch.float64)
    whole = cpu_rows.streaming_stats(hidden, weight, labels, inv, num_valid=33)
    monkeypatch.setattr(cpu_rows, "SCORING_COLUMNS", 8)
    blocks = cpu_rows.streaming_stats(hidden, weight, labels, inv, num_valid=33)
    assert len(blocks) == 7
    torch.testing.assert_close(row_stats.merge(blocks), whole[0], rtol=1e-13, atol=1e-13)


def test_what_is_not_built_names_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_rows, "LIBRARIES", tmp_path)
    usable, reason = cpu_rows.available()
    assert not usable
    assert "g++" in reason


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizers: str, tmp_path: Path) -> None:
    """Odd sizes, empty shards, values that are not finite: see the driver."""
    source = Path(__file__).parents[3] / "csrc" / "ops" / "head_rows.cpp"
    driver = Path(__file__).with_name("head_rows_sanitized.cpp")
    require(shutil.which("g++") is not None, "g++")
    machine = {"v4": ["-march=x86-64-v4"], "v3": ["-march=x86-64-v3"]}
    for build in runnable():
        program = tmp_path / f"driver-{build}"
        flags = ["-O1", "-g", "-std=c++17", "-pthread", "-Wno-psabi", *machine.get(build, [])]
        flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
        subprocess.run(["g++", *flags, str(source), str(driver), "-o", str(program)], check=True)
        done = subprocess.run([str(program)], capture_output=True, text=True)
        assert done.returncode == 0, f"{build}: {done.stdout}{done.stderr[-3000:]}"
