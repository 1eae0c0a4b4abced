"""Attention split over 1, 2 and 4 gloo processes against the definition on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import context_parallel_worker as worker
import pytest
import torch
from attention_cases import PADDED, check_padding, exact, make, padded, poisoned
from forked_ranks import start
from torch import Tensor

from swe_rl import ops
from swe_rl.batching.cp_split import place_rows
from swe_rl.errors import ConfigError
from swe_rl.ops import attention_reference, partial_attention

SIZES = (1, 2, 4)
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def folder_of_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(worker, tmp_path_factory.mktemp("ranks"), "short", *SIZES)


def reference(job: worker.Job, size: int) -> list[Tensor]:
    """out, dq, dk, dv of the rows without padding, in fp64."""
    kv_end = job.kv_end()
    *inputs, grad = (t[: len(kv_end)].double() for t in job.tensors(size))
    for tensor in inputs:
        tensor.requires_grad_()
    out, _ = attention_reference.attention(*inputs, kv_end, 0.4)
    out.backward(grad)
    return [out.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


def check(folder: Path, kind: str, size: int, want: Callable[[worker.Job, int], list[Tensor]]) -> None:
    parts = [torch.load(folder / f"{size}-{rank}.pt") for rank in range(size)]
    for number, job in enumerate(worker.jobs(kind)):
        placement, ends = job.placed(size)
        tokens = len(job.kv_end())
        for name, column, wanted in zip(("out", "dq", "dk", "dv"), range(4), want(job, size), strict=True):
            whole = torch.empty((len(ends), *wanted.shape[1:]), dtype=torch.float64)
            for rank in range(size):
                whole[placement[rank]] = parts[rank][number][column].double()
            error = float((whole[:tokens] - wanted).norm() / wanted.norm())
            assert error <= BOUNDS[job.dtype], f"{job} {name}: {error:.1e}"
            assert not whole[tokens:].any(), f"{job} {name}: padding takes part"


@pytest.mark.parametrize("size", SIZES)
def test_output_and_gradients_are_those_of_one_process(size: int, folder_of_results: Path) -> None:
    check(folder_of_results, "short", size, reference)


@pytest.mark.nightly
def test_one_sequence_of_32768_on_two_ranks(tmp_path: Path) -> None:
    def one_process(job: worker.Job, size: int) -> list[Tensor]:
        *inputs, grad = job.tensors(size)
        for tensor in inputs:
            tensor.requires_grad_()
        out = ops.attention(*inputs, kv_end=job.kv_end(), scale=0.4)
        out.backward(grad)
        return [t.double() for t in (out.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None))]

    check(start(worker, tmp_path, "long", 2), "long", 2, one_process)


def test_parts_of_the_keys_merge_to_the_whole() -> None:
    """In any order of keys, with rows that see nothing of one part."""
    kv_end = worker.Job("ring", "tree", "work", torch.float64).kv_end()
    tokens = len(kv_end)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    want, want_lse = attention_reference.attention(q, k, v, kv_end, 0.3)
    rows = torch.arange(3, tokens, 2)
    keys = torch.randperm(tokens, generator=generator)
    out, lse = torch.zeros_like(q[rows]), torch.full((4, len(rows)), -torch.inf, dtype=torch.float64)
    for part in keys.split(7):
        seen = partial_attention.visible(rows, part, kv_end)
        partial_attention.merge(out, lse, *partial_attention.forward(q[rows], k[part], v[part], seen, 0.3))
    torch.testing.assert_close(out, want[rows], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse[:, rows], rtol=1e-12, atol=1e-12)


def test_a_row_longer_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_attention, "TILE_ROWS", 5)
    monkeypatch.setattr(partial_attention, "TILE_KEYS", 6)
    test_parts_of_the_keys_merge_to_the_whole()


@pytest.mark.parametrize("kind", PADDED)
def test_padding_is_zero_whatever_it_holds(kind: str) -> None:
    """Rows on three ranks, each of which sees the keys in parts, as in a ring."""
    kv_end, tensors = padded(kind), make(150, 4, 2, 16)
    dirty, blind, unseen = poisoned(tensors, kv_end)
    q, k, v, grad = dirty
    out, lse = torch.zeros_like(q), torch.full((4, 150), -torch.inf)
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    parts = torch.arange(150).view(-1, 3).T.contiguous()
    for rows in parts:
        mine, top = out[rows], lse[:, rows]
        for keys in parts:
            seen = partial_attention.visible(rows, keys, kv_end)
            partial_attention.merge(mine, top, *partial_attention.forward(q[rows], k[keys], v[keys], seen, 0.25))
        out[rows], lse[:, rows] = mine, top
        for keys in parts:
            seen = partial_attention.visible(rows, keys, kv_end)
            found = partial_attention.backward(grad[rows], q[rows], k[keys], v[keys], mine, top, seen, 0.25)
            for total, places, part in zip((dq, dk, dv), (rows, keys, keys), found, strict=True):
                total[places] += part
    check_padding([out, lse, dq, dk, dv], exact(tensors, kv_end), blind, unseen)


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"placement='best' is unknown: use one of work, zigzag"):
        place_rows(torch.tensor([1], dtype=torch.int32), num_ranks=2, placement="best")
