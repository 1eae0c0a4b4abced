"""A packed row dealt out to the ranks of a context-parallel group."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from tree_groups import random_group

from swe_rl.batching.cp_split import place_blocks, place_rows, split, targets_of, visible_keys
from swe_rl.batching.layout import lay_out
from swe_rl.errors import ConfigError
from swe_rl.ops import trie


def documents(lengths: list[int]) -> Tensor:
    ends = torch.tensor(lengths).cumsum(0)
    return ends.repeat_interleave(torch.tensor(lengths)).int()


def tree(tokens: int, seed: int) -> Tensor:
    """A forest that branches everywhere, with long and short branches."""
    rng = random.Random(seed)
    samples: list[list[int]] = []
    left = tokens
    while left > 0:
        before = rng.choice(samples) if samples and rng.random() < 0.9 else []
        new = min(left, rng.randrange(1, max(2, tokens // 20)))
        kept = before[: rng.randrange(len(before) + 1)] if before else []
        samples.append([*kept, 1000 + len(samples), *(rng.randrange(9) for _ in range(new - 1))])
        left -= new
    ids = torch.tensor([i for sample in samples for i in sample])
    offsets = trie.flat_offsets([len(sample) for sample in samples])
    return trie.tree_rows(ids, offsets, trie.build_forest(ids, offsets)).kv_end


def brute_force(kv_end: Tensor, rows: Tensor) -> int:
    """Visible pairs of some rows, counted from the mask block by block."""
    keys = torch.arange(len(kv_end))
    return sum(
        int(((keys[None] <= part[:, None]) & (part[:, None] < kv_end.long()[None])).sum()) for part in rows.split(512)
    )


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(1, 5), st.sampled_from(["work", "zigzag"]))
def test_every_row_is_on_one_rank_and_counts_are_equal(lengths: list[int], size: int, placement: str) -> None:
    kv_end = documents(lengths) if lengths else torch.empty(0, dtype=torch.int32)
    rows, ends = place_rows(kv_end, num_ranks=size, placement=placement, block_tokens=2)
    assert sorted(rows.flatten().tolist()) == list(range(len(ends)))
    assert all(row.diff().gt(0).all() for row in rows)
    assert torch.equal(ends[: len(kv_end)], kv_end)
    padding = torch.arange(len(kv_end), len(ends))
    assert torch.equal(ends[len(kv_end) :].long(), padding), "padding is seen by nobody"
    assert visible_keys(ends).tolist() == [brute_force(ends, row[None]) for row in torch.arange(len(ends))]


@pytest.mark.parametrize("mask", ["one document", "documents", "tree", "prompts"])
def test_work_of_eight_ranks_differs_by_five_percent_at_most(mask: str) -> None:
    """Recounted from the mask."""
    rng = random.Random(mask)
    kv_end = {
        "one document": lambda: documents([6_001]),
        "documents": lambda: documents([rng.randrange(1, 900) for _ in range(14)]),
        "tree": lambda: tree(5_000, 5),
        "prompts": lambda: documents([3_000, 5, 3, 1, 700, 1_500]),
    }[mask]()
    rows, ends = place_rows(kv_end, num_ranks=8)
    work = [brute_force(ends, row) for row in rows]
    assert max(work) / (sum(work) / 8) <= 1.05, work


@given(st.lists(st.integers(0, 50), min_size=12, max_size=12), st.sampled_from([1, 2, 3, 4, 6]))
def test_every_rank_gets_as_many_blocks(work: list[int], size: int) -> None:
    placed = place_blocks(work, size)
    assert [len(blocks) for blocks in placed] == [12 // size] * size
    assert sorted(block for blocks in placed for block in blocks) == list(range(12))


def test_blocks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_ranks=5 does not divide 12 blocks"):
        place_blocks([1.0] * 12, 5)


@pytest.mark.parametrize("layout", ["sequence", "tree"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_targets_travel_with_their_rows(layout: str, size: int) -> None:
    for seed in range(6):
        samples = random_group(random.Random(seed), size=4)
        for batch in lay_out(samples, max_tokens=60, layout=layout).batches:
            rows, ends = place_rows(batch.kv_end, num_ranks=size)
            parts = [split(batch, rows, ends, rank) for rank in range(size)]
            found = []
            for rank, part in enumerate(parts):
                assert len(part.input_ids) == len(ends) // size
                assert part.context_rows is rows
                real = rows[rank] < len(batch.input_ids)
                assert torch.equal(part.input_ids[real], batch.input_ids[rows[rank][real]])
                assert torch.equal(part.position_ids[real], batch.position_ids[rows[rank][real]])
                assert part.target_rows is not None
                names = [
                    name
                    for name, a, b in zip(part.trajectory_ids, part.sample_bounds, part.sample_bounds[1:], strict=False)
                    for _ in range(b - a)
                ]
                columns = (part.labels, part.advantages, part.token_weights, part.rollout_logprobs)
                before = rows[rank][part.target_rows].tolist()
                found += list(zip(names, before, *(column.tolist() for column in columns), strict=True))
            trained = batch.loss_mask
            whole = batch.target_rows if batch.target_rows is not None else torch.arange(len(batch.input_ids))
            bounds = batch.sample_bounds
            names = [n for n, a, b in zip(batch.trajectory_ids, bounds, bounds[1:], strict=False) for _ in range(b - a)]
            columns = (batch.labels, batch.advantages, batch.token_weights, batch.rollout_logprobs)
            want = list(zip(names, whole.tolist(), *(column.tolist() for column in columns), strict=True))
            assert sorted(found) == sorted(w for w, m in zip(want, trained.tolist(), strict=True) if m)
            total = len(batch.input_ids) if batch.num_sample_tokens is None else batch.num_sample_tokens
            assert sum(part.num_sample_tokens or 0 for part in parts) == total
            assert sum(part.num_tokens for part in parts) == len(batch.input_ids)
            for rank, part in enumerate(parts):
                assert torch.equal(batch.labels[targets_of(batch, rows, rank)], part.labels)
