"""The interval mask, and everything made from it, against visibility by chains of parents."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_cases import crossing, packed, random_forest
from torch import Tensor

from swe_rl.ops import attention_levels, attention_mask
from swe_rl.ops.attention_blocks import MAX_RANGES, end_bounds, key_ranges
from swe_rl.ops.attention_facts import LatestMask
from swe_rl.ops.attention_mask import Tile, block_tiles, dense_mask, plan, run_tiles, runs, tile_mask

FORESTS = range(200)


def painted(tiles: list[Tile], kv_end: Tensor) -> Tensor:
    """[T, T] how often each pair is computed."""
    count = torch.zeros(len(kv_end), len(kv_end), dtype=torch.int64)
    reached: set[int] = set()
    for tile in tiles:
        rows = torch.arange(len(kv_end))[tile.rows]
        keys = torch.arange(len(kv_end))[tile.keys]
        flags = torch.ones(len(rows), len(keys), dtype=torch.int64)
        if tile.kind == "causal":
            flags = flags.tril()
        if tile.kind == "masked":
            flags = tile_mask(tile, kv_end).long()
        count[rows[:, None], keys[None, :]] += flags
        assert tile.fresh == (not reached & set(rows.tolist()))
        reached |= set(rows.tolist())
    return count


@pytest.mark.parametrize("seed", FORESTS)
def test_two_hundred_forests(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mask, "BLOCK_ROWS", 16)
    monkeypatch.setattr(attention_mask, "MASKED_KEYS", 8)
    kv_end, visible = random_forest(20 + seed, seed, padding=seed % 4)
    assert torch.equal(dense_mask(kv_end), visible)
    for tiles in (list(run_tiles(runs(kv_end))), list(block_tiles(kv_end)), plan(kv_end)):
        assert torch.equal(painted(tiles, kv_end), visible.long())


@pytest.mark.parametrize("seed", range(20))
def test_masks_that_are_no_forest(seed: int) -> None:
    kv_end = crossing(90, seed)
    assert attention_levels.levels(runs(kv_end), torch.device("cpu")) is None
    for tiles in (list(run_tiles(runs(kv_end))), list(block_tiles(kv_end))):
        assert torch.equal(painted(tiles, kv_end), dense_mask(kv_end).long())


def test_documents_are_one_causal_tile_each() -> None:
    kv_end = packed(3, 1, 200, padding=5)
    assert [(tile.rows.start, tile.rows.stop, tile.kind) for tile in plan(kv_end)] == [
        (0, 3, "causal"), (3, 4, "causal"), (4, 204, "causal"),
    ]  # fmt: skip
    assert plan(packed(padding=4)) == []
    assert attention_mask.documents(runs(kv_end))
    assert not attention_mask.documents(runs(torch.tensor([3, 2, 3], dtype=torch.int32)))


def test_a_bush_of_single_tokens_goes_by_blocks_and_a_few_branches_by_runs() -> None:
    bush = torch.tensor([2000] * 8 + [8 + key + 1 for key in range(1992)], dtype=torch.int32)
    assert any(tile.kind == "masked" for tile in plan(bush))
    assert len(plan(bush)) < 50
    branches = torch.tensor([4000] * 1000 + [2500] * 1500 + [4000] * 1500, dtype=torch.int32)
    assert [tile.kind for tile in plan(branches)] == ["causal", "full", "causal", "causal"]


@pytest.mark.parametrize("seed", [*range(0, 200, 7)])
def test_levels_cover_every_pair_once_and_no_call_has_a_row_twice(seed: int) -> None:
    kv_end, visible = random_forest(20 + seed, seed, padding=seed % 4)
    calls = attention_levels.levels(runs(kv_end), torch.device("cpu"))
    assert calls is not None
    count = torch.zeros_like(visible, dtype=torch.int64)
    for call in calls:
        rows, keys = (torch.arange(len(kv_end))[places] for places in (call.rows, call.keys))
        assert len(set(rows.tolist())) == len(rows)
        assert len(set(keys.tolist())) == len(keys)
        starts = zip(call.segments.row_starts.tolist(), call.segments.key_starts.tolist(), strict=True)
        stretches = list(starts)
        for (row, key), (row_stop, key_stop) in itertools.pairwise(stretches):
            flags = torch.ones(row_stop - row, key_stop - key, dtype=torch.int64)
            assert flags.shape[0] <= call.segments.max_rows
            assert flags.shape[1] <= call.segments.max_keys
            count[rows[row:row_stop, None], keys[None, key:key_stop]] += flags.tril() if call.segments.causal else flags
    assert torch.equal(count, visible.long())


def walked(kv_end: Tensor, query_block: int, key_block: int) -> Tensor:
    """[T, T] how often each pair is computed by a kernel that walks over the ranges."""
    tokens, mask = len(kv_end), dense_mask(kv_end)
    count = torch.zeros(tokens, tokens, dtype=torch.int64)
    full, masked, counts = key_ranges(kv_end, query_block, key_block)
    for block in range(len(counts)):
        rows = slice(block * query_block, min((block + 1) * query_block, tokens))
        for kind, ranges in enumerate((full, masked)):
            for start, stop in ranges[block, : counts[block, kind]].tolist():
                assert 0 <= start < stop <= -(-tokens // key_block)
                keys = slice(start * key_block, min(stop * key_block, tokens))
                if kind == 0:
                    assert mask[rows, keys].all()
                    assert stop * key_block <= tokens
                count[rows, keys] += mask[rows, keys]
    return count


@pytest.mark.parametrize("blocks", [(16, 16), (32, 8), (8, 32)])
@pytest.mark.parametrize("seed", [*range(0, 200, 11)])
def test_ranges_of_key_blocks_cover_every_pair_once(seed: int, blocks: tuple[int, int]) -> None:
    kv_end, visible = random_forest(20 + 2 * seed, seed, padding=seed % 4)
    assert torch.equal(walked(kv_end, *blocks), visible.long())


@pytest.mark.parametrize("seed", range(5))
def test_more_ranges_than_there_is_room_for(seed: int) -> None:
    kv_end = torch.arange(1, 4 * 40 * MAX_RANGES + 1, dtype=torch.int32)
    kv_end[seed :: 4 * 8] = len(kv_end)  # one key in every other block lives to the end
    assert torch.equal(walked(kv_end, 16, 16), dense_mask(kv_end).long())
    counts = key_ranges(kv_end, 16, 16).counts
    assert counts.max() == MAX_RANGES
    crossed = crossing(300, seed)
    assert torch.equal(walked(crossed, 4, 4), dense_mask(crossed).long())


def test_a_long_document_has_two_ranges_and_short_ones_skip_what_is_over() -> None:
    full, masked, counts = key_ranges(packed(1000), 128, 64)
    assert counts.tolist() == [[0, 1]] + [[1, 1]] * 7
    assert full[7, 0].tolist() == [0, 14]
    assert masked[7, 0].tolist() == [14, 16]
    _, masked, counts = key_ranges(packed(*[64] * 20), 64, 64)
    assert counts.tolist() == [[0, 1]] * 20
    assert masked[:, 0].tolist() == [[block, block + 1] for block in range(20)]


def test_bounds_ignore_what_is_beyond_the_last_token() -> None:
    kv_end = packed(5, 2, padding=1)
    lowest, highest = end_bounds(kv_end, 3)
    assert lowest.tolist() == [5, 5, 7]
    assert highest.tolist() == [5, 7, 7]
    assert key_ranges(kv_end[:0], 4, 4).counts.shape == (0, 2)


def test_facts_are_made_once_for_a_mask_and_anew_after_a_write() -> None:
    latest, kv_end = LatestMask(), packed(4, 4)
    facts = latest.facts(kv_end)
    assert latest.facts(kv_end) is facts
    assert latest.facts(kv_end.detach()) is facts
    assert latest.facts(kv_end.clone()) is not facts
    facts = latest.facts(kv_end)
    kv_end[:4] = 8
    again = latest.facts(kv_end)
    assert again is not facts
    assert again.runs == runs(kv_end)
    with torch.inference_mode():
        inside = kv_end.clone()
        assert latest.facts(inside).runs == again.runs
        inside[:] = torch.arange(8)
        assert latest.facts(inside).runs == []
