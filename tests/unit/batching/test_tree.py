"""Trees lose nothing, double nothing, and every target stands behind exactly its own context."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from tree_groups import random_group

from swe_rl.batching.layout import PackedSamples, lay_out
from swe_rl.errors import InvariantError
from swe_rl.types import TrainSample

COLUMNS = ("rollout_logprobs", "advantages", "token_weights")


def check(samples: list[TrainSample], max_tokens: int) -> PackedSamples:
    """Pack, unpack, compare; then the contexts."""
    layout = lay_out(samples, max_tokens=max_tokens, layout="tree")
    per_target = {
        **{name: [list(getattr(s, name)) for s in samples] for name in COLUMNS},
        "labels": [list(s.input_ids) for s in samples],
        "policy_version": [[s.policy_version] * len(s.input_ids) for s in samples],
    }
    for name, wanted in per_target.items():
        back = layout.unpack([getattr(batch, name) for batch in layout.batches], fill=math.nan)
        for sample, got, want in zip(samples, back, wanted, strict=True):
            assert [math.isnan(value) for value in got] == [not m for m in sample.loss_mask], name
            pairs = [(g, w) for g, w, m in zip(got, want, sample.loss_mask, strict=True) if m]
            assert all(abs(g - w) <= 1e-6 * abs(w) for g, w in pairs), name
    targets = sum(len(batch.labels) for batch in layout.batches)
    assert targets == sum(sum(sample.loss_mask) for sample in samples), "each sampled token trains exactly once"
    placed = [place.sample for row in layout.places for place in row]
    assert sorted(placed) == [i for i, sample in enumerate(samples) if any(sample.loss_mask)]
    for batch, places in zip(layout.batches, layout.places, strict=True):
        size = len(batch.input_ids)
        assert size <= max(max_tokens, *(place.positions[-1] for place in places))
        assert (batch.cu_seqlens_host[0], batch.cu_seqlens_host[-1]) == (0, size)
        rows = torch.arange(size)
        sees = (rows[None, :] <= rows[:, None]) & (batch.kv_end[None, :] > rows[:, None])  # [query, key]
        assert batch.target_rows is not None
        for place in places:
            last = place.positions[-1]
            end = int(batch.target_rows[place.start + len(place.positions) - 1])
            path = sees[end].nonzero()[:, 0]
            assert batch.input_ids[path].tolist() == samples[place.sample].input_ids[:last]
            assert batch.position_ids[path].tolist() == list(range(last))
            assert (sees[path].sum(1) == batch.position_ids[path] + 1).all(), "a row sees no more than its path"
            mine = batch.target_rows[place.start : place.start + len(place.positions)]
            assert torch.equal(mine, path[torch.tensor(list(place.positions)) - 1])
    return layout


@pytest.mark.parametrize("part", range(4))
def test_random_groups(part: int) -> None:
    rng = random.Random(f"groups/{part}")
    for _ in range(60):
        check(random_group(rng, size=rng.randrange(0, 7), vocab=rng.choice((2, 3, 50))), rng.randrange(4, 70))


@pytest.mark.parametrize(
    "count", [pytest.param(1_000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.nightly)]
)
def test_many_random_groups_lose_and_double_nothing(count: int) -> None:
    rng = random.Random("many")
    for _ in range(count):
        check(random_group(rng, size=rng.randrange(0, 6), vocab=rng.choice((2, 3, 50))), rng.randrange(4, 70))


def sample(name: str, ids: list[int], mask: list[int], *, turn: int = 0) -> TrainSample:
    trains = [bool(m) for m in mask]
    return TrainSample(
        trajectory_id=name,
        input_ids=ids,
        loss_mask=trains,
        rollout_logprobs=[-0.5 if m else 0.0 for m in trains],
        advantages=[float(ord(name[0])) if m else 0.0 for m in trains],
        turn_ids=[turn if m else -1 for m in trains],
        policy_version=0,
        temperature=1.0,
    )


def test_a_row_with_several_targets_by_hand() -> None:
    """a and b share the prompt 1 2 and sample 3 both; then they part. The later sample of a repeats its first one."""
    group = [
        sample("a", [1, 2, 3, 4], [0, 0, 1, 1]),
        sample("b", [1, 2, 3, 5, 6], [0, 0, 1, 1, 0]),
        sample("a", [1, 2, 3, 4, 7, 8], [0, 0, 0, 0, 0, 1], turn=1),
    ]
    (batch,) = lay_out(group, max_tokens=100, layout="tree").batches
    assert batch.target_rows is not None
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 7], "nothing after the last target, nothing twice"
    assert batch.kv_end.tolist() == [5] * 5
    sizes = [stop - start for start, stop in itertools.pairwise(batch.target_bounds)]
    names = [name for name, size in zip(batch.trajectory_ids, sizes, strict=True) for _ in range(size)]
    found = sorted(zip(names, batch.target_rows.tolist(), batch.labels.tolist(), strict=True))
    assert found == [("a", 1, 3), ("a", 2, 4), ("a", 4, 8), ("b", 1, 3), ("b", 2, 5)]
    assert batch.num_sample_tokens == 15
    assert sorted(set(batch.advantages.tolist())) == [97.0, 98.0]


def test_a_token_that_trains_in_two_samples_is_refused() -> None:
    twice = [sample("a", [1, 2], [0, 1]), sample("a", [1, 2, 3], [0, 1, 0])]
    with pytest.raises(InvariantError, match=r"a: turn 0 trains in two samples: mask it"):
        lay_out(twice, max_tokens=10, layout="tree")
    lay_out([twice[0], replace(twice[1], trajectory_id="b")], max_tokens=10, layout="tree")


def test_samples_without_a_target_are_not_computed() -> None:
    layout = lay_out([sample("a", [1, 2, 3], [0, 0, 0])], max_tokens=10, layout="tree")
    assert layout.batches == []
    assert layout.unpack([], fill=0.5) == [[0.5, 0.5, 0.5]]


def test_values_of_states_are_targets_too() -> None:
    """A turn's state has a value also where none of its tokens trains."""
    group = [replace(sample("a", [1, 2, 3], [0, 0, 0]), value_targets=[math.nan, 2.0, math.nan], value_weight=0.5)]
    layout = lay_out(group, max_tokens=10, layout="tree")
    (batch,) = layout.batches
    assert (batch.target_rows.tolist(), batch.loss_mask.tolist()) == ([0], [False])
    assert (batch.value_targets.tolist(), batch.value_weight.tolist()) == ([2.0], [0.5])
    assert layout.unpack([torch.tensor([7.0])], fill=math.nan)[0][1] == 7.0
