"""Properties of packed rows over random samples, and one row written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swe_rl.batching import empty_batch, pack
from swe_rl.errors import InvariantError
from swe_rl.types import PackedBatch, TrainSample


def build(name: str, ids: list[int], mask: list[bool], *, temperature: float = 1.0, version: int = 0) -> TrainSample:
    return TrainSample(
        trajectory_id=name,
        input_ids=ids,
        loss_mask=mask,
        rollout_logprobs=[-float(i) / 7 if m else 0.0 for i, m in zip(ids, mask, strict=True)],
        advantages=[float(i) if m else 0.0 for i, m in zip(ids, mask, strict=True)],
        turn_ids=[0 if m else -1 for m in mask],
        policy_version=version,
        temperature=temperature,
        token_weights=[1.0 / i if m else 0.0 for i, m in zip(ids, mask, strict=True)],
    )


@st.composite
def samples(draw: st.DrawFn) -> list[TrainSample]:
    """Ids grow from 1 over the whole list: an id names its token."""
    built, first = [], 1
    for index in range(draw(st.integers(0, 9))):
        size = draw(st.integers(1, 12))
        mask = [False, *draw(st.lists(st.booleans(), min_size=size - 1, max_size=size - 1))]
        temperature = draw(st.sampled_from([1.0, 0.5]))
        built.append(build(f"t{index}", list(range(first, first + size)), mask, temperature=temperature, version=index))
        first += size
    return built


def documents(batches: list[PackedBatch]) -> dict[str, tuple[PackedBatch, slice]]:
    found = {}
    for batch in batches:
        borders = batch.cu_seqlens_host
        for name, start, stop in zip(batch.trajectory_ids, borders[:-1], borders[1:], strict=True):
            assert name not in found, "a sample is packed once"
            found[name] = (batch, slice(start, stop))
    return found


@given(samples(), st.integers(1, 20))
def test_every_sample_is_packed_once_and_shifted_once(given_samples: list[TrainSample], max_tokens: int) -> None:
    batches = pack(given_samples, max_tokens=max_tokens)
    placed = documents(batches)
    assert set(placed) == {s.trajectory_id for s in given_samples}
    for sample in given_samples:
        batch, part = placed[sample.trajectory_id]
        size = len(sample.input_ids)
        assert batch.input_ids[part].tolist() == sample.input_ids
        assert batch.position_ids[part].tolist() == list(range(size))
        assert batch.kv_end[part].tolist() == [part.stop] * size
        assert batch.policy_version[part].tolist() == [sample.policy_version] * size
        temperature = batch.temperature[part].tolist() if batch.temperature is not None else [1.0] * size
        assert temperature == [sample.temperature] * size
        assert batch.labels[part][:-1].tolist() == sample.input_ids[1:]
        for name in ("loss_mask", "rollout_logprobs", "advantages", "token_weights"):
            got, want = getattr(batch, name)[part].tolist(), getattr(sample, name)
            assert got[:-1] == pytest.approx(want[1:])
            assert got[-1] == 0, "nothing follows the last token"


@given(samples(), st.integers(1, 20))
def test_rows_respect_the_limit_and_nothing_is_lost(given_samples: list[TrainSample], max_tokens: int) -> None:
    batches = pack(given_samples, max_tokens=max_tokens)
    for batch in batches:
        size = len(batch.input_ids)
        assert size <= max_tokens or len(batch.trajectory_ids) == 1
        assert batch.cu_seqlens.tolist() == list(batch.cu_seqlens_host)
        assert batch.cu_seqlens_host[-1] == size
    assert sum(int(b.loss_mask.sum()) for b in batches) == sum(sum(s.loss_mask) for s in given_samples)
    total = math.fsum(w for s in given_samples for w in s.token_weights)
    assert sum(float(b.token_weights.double().sum()) for b in batches) == pytest.approx(total, rel=1e-6)


@given(samples(), st.integers(12, 40))
def test_first_fit_leaves_no_two_half_empty_rows(given_samples: list[TrainSample], max_tokens: int) -> None:
    sizes = [len(b.input_ids) for b in pack(given_samples, max_tokens=max_tokens)]
    assert sum(2 * size <= max_tokens for size in sizes) <= 1


@given(samples(), st.integers(1, 20))
def test_packing_is_deterministic(given_samples: list[TrainSample], max_tokens: int) -> None:
    first, second = (pack(given_samples, max_tokens=max_tokens) for _ in range(2))
    assert [b.trajectory_ids for b in first] == [b.trajectory_ids for b in second]


def test_one_row_by_hand() -> None:
    """Two documents; the border is crossed by neither labels nor positions nor keys."""
    short = build("short", [8, 9], [False, True], temperature=0.5, version=4)
    long = build("long", [1, 2, 3], [False, True, True])
    (row,) = pack([short, long], max_tokens=5)
    assert row.trajectory_ids == ("long", "short")
    assert row.input_ids.tolist() == [1, 2, 3, 8, 9]
    assert row.labels.tolist() == [2, 3, 0, 9, 0]
    assert row.loss_mask.tolist() == [True, True, False, True, False]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert row.kv_end.tolist() == [3, 3, 3, 5, 5]
    assert row.cu_seqlens_host == (0, 3, 5)
    assert row.advantages.tolist() == [2, 3, 0, 9, 0]
    assert row.temperature is not None
    assert row.temperature.tolist() == [1, 1, 1, 0.5, 0.5]
    assert row.policy_version.tolist() == [0, 0, 0, 4, 4]
    assert (row.old_logprobs, row.ref_logprobs) == (None, None)
    assert [row.input_ids.dtype, row.kv_end.dtype, row.cu_seqlens.dtype] == [torch.int64, torch.int32, torch.int32]


def test_a_longer_sample_gets_a_row_of_its_own() -> None:
    rows = pack([build("a", [1, 2], [False, True]), build("b", list(range(1, 9)), [False] * 8)], max_tokens=4)
    assert [r.trajectory_ids for r in rows] == [("b",), ("a",)]


def test_missing_weights_are_nan_on_trained_tokens_only() -> None:
    sample = TrainSample(
        trajectory_id="t",
        input_ids=[1, 2, 3],
        loss_mask=[False, True, False],
        rollout_logprobs=[0.0] * 3,
        advantages=[0.0] * 3,
        turn_ids=[-1] * 3,
        policy_version=0,
        temperature=1.0,
    )
    (row,) = pack([sample], max_tokens=8)
    assert row.token_weights.isnan().tolist() == [True, False, False]


def test_broken_samples_are_refused() -> None:
    with pytest.raises(InvariantError, match="nothing predicts it"):
        pack([build("t", [1, 2], [True, True])], max_tokens=8)
    with pytest.raises(InvariantError, match="for 0 tokens"):
        pack([build("t", [], [])], max_tokens=8)


def test_the_empty_batch_trains_nothing() -> None:
    batch = empty_batch()
    assert len(batch.input_ids) == 1
    assert not batch.loss_mask.any()
