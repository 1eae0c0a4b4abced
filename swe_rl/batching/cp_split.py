"""One packed row on several ranks: which of them has which tokens, so that all have as many and attention work alike.

A causal row is uneven: its last tokens see all others. Blocks are therefore dealt out by their exact work under the
mask, the heaviest first to the rank with the least so far, as many blocks to each rank. Labels, weights and positions
travel with their tokens; the row is padded with tokens that see nothing and are seen by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.types import PackedBatch

BLOCK_TOKENS = 512  # at most, of a block; a short row has smaller ones, for BLOCKS_PER_RANK of each rank
BLOCKS_PER_RANK = 16
PLACEMENTS = ("work", "zigzag")


def visible_keys(kv_end: Tensor) -> Tensor:
    """[T] i64: how many keys each row sees, itself included; 0 for padding. kv_end [T] i32."""
    rows = torch.arange(len(kv_end), device=kv_end.device)
    ended = torch.bincount(kv_end.long(), minlength=len(kv_end) + 1)[: len(kv_end)].cumsum(0)
    return rows + 1 - ended  # a key that ended before or at row q is not seen by it, and none begins after its end


def place_blocks(work: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Blocks of each rank, rising: as many for each, sums of `work` alike.

    Longest processing time first, then swaps between the busiest and the idlest rank while they help.
    Raises ConfigError unless the number of blocks is a multiple of num_ranks.
    """
    if num_ranks < 1 or len(work) % num_ranks:
        raise ConfigError(f"num_ranks={num_ranks} does not divide {len(work)} blocks")
    each = len(work) // num_ranks
    placed: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for block in sorted(range(len(work)), key=lambda b: -work[b]):
        rank = min((r for r in range(num_ranks) if len(placed[r]) < each), key=lambda r: (loads[r], r))
        placed[rank].append(block)
        loads[rank] += work[block]
    while _swap(placed, loads, work):
        pass
    return [sorted(blocks) for blocks in placed]


def _swap(placed: list[list[int]], loads: list[float], work: Sequence[float]) -> bool:
    """Exchanges the pair of blocks of the busiest and the idlest rank that evens them out best; False without one."""
    high, low = loads.index(max(loads)), loads.index(min(loads))
    gap = loads[high] - loads[low]
    pairs = [(abs(gap - 2 * (work[a] - work[b])), a, b) for a in placed[high] for b in placed[low]]
    left, mine, theirs = min(pairs, default=(gap, 0, 0))
    if left >= gap * (1 - 1e-6):
        return False
    placed[high].remove(mine)
    placed[low].remove(theirs)
    placed[high].append(theirs)
    placed[low].append(mine)
    moved = work[mine] - work[theirs]
    loads[high] -= moved
    loads[low] += moved
    return True


def place_rows(
    kv_end: Tensor, *, num_ranks: int, placement: str = "work", block_tokens: int = BLOCK_TOKENS
) -> tuple[Tensor, Tensor]:
    """(placement [R, n] i64, kv_end [R n] i32): the rows of each rank, rising, of the row padded to R n tokens.

    "work" deals out blocks by their work under the mask; "zigzag" gives rank r the r-th of 2 R equal parts and the r-th
    from behind, which is as even for one causal document. Raises ConfigError for another name.
    """
    if placement not in PLACEMENTS:
        raise ConfigError(f"placement={placement!r} is unknown: use one of {', '.join(PLACEMENTS)}")
    tokens = len(kv_end)
    parts = 2 * num_ranks if placement == "zigzag" else num_ranks * BLOCKS_PER_RANK
    block = max(1, -(-tokens // parts))
    if placement == "work":
        block = min(block, block_tokens)
    count = -(-max(tokens, 1) // (block * num_ranks)) * num_ranks
    if placement == "zigzag":
        count = 2 * num_ranks
    ends = torch.cat([kv_end, torch.arange(tokens, count * block, dtype=kv_end.dtype, device=kv_end.device)])
    if placement == "zigzag":
        blocks = [[rank, count - 1 - rank] for rank in range(num_ranks)]
    else:
        blocks = place_blocks(visible_keys(ends).view(count, block).sum(dim=1).tolist(), num_ranks)
    rows = torch.arange(count * block, device=kv_end.device).view(count, block)
    return torch.stack([rows[mine].flatten() for mine in blocks]), ends


def split(batch: PackedBatch, placement: Tensor, kv_end: Tensor, rank: int) -> PackedBatch:
    """The part of one rank: its rows of input_ids and position_ids, and the targets that stand behind them.

    placement and kv_end from place_rows. kv_end of the part is that of the whole (padded) row, cu_seqlens that of the
    batch; `context_rows` says which rows the ranks have. Token weights and denominators are untouched, so gradients of
    the ranks are only added.
    """
    mine = placement[rank]
    padding = kv_end.shape[0] - len(batch.input_ids)
    place = _places(placement, rank)
    rows, asked = _targets(batch), targets_of(batch, placement, rank)
    columns: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if field.name in ("input_ids", "position_ids"):
            columns[field.name] = torch.nn.functional.pad(value, (0, padding))[mine]
        elif isinstance(value, Tensor) and field.name not in ("cu_seqlens", "kv_end", "target_rows"):
            columns[field.name] = value[asked]
    bounds = torch.searchsorted(asked, torch.tensor(batch.sample_bounds, device=asked.device))
    return replace(
        batch,
        **columns,
        kv_end=kv_end,
        target_rows=place[rows[asked]],
        target_bounds=tuple(bounds.tolist()),
        num_sample_tokens=_share(batch, rank, len(placement)),
        context_rows=placement,
        num_padding=int((mine >= len(batch.input_ids)).sum()),
    )


def targets_of(batch: PackedBatch, placement: Tensor, rank: int) -> Tensor:
    """[e] i64, rising: which targets of the batch are those of the rank's part. Of plain documents only those that
    something is asked about; placement from place_rows."""
    chosen = (_places(placement, rank)[_targets(batch)] >= 0).nonzero()[:, 0]
    return chosen if batch.target_rows is not None else chosen[_wanted(batch)[chosen]]


def _places(placement: Tensor, rank: int) -> Tensor:
    """[R n] i64: where in the part of the rank a row stands; -1 elsewhere."""
    mine = placement[rank]
    place = torch.full((placement.numel(),), -1, dtype=torch.int64, device=mine.device)
    place[mine] = torch.arange(len(mine), device=mine.device)
    return place


def _targets(batch: PackedBatch) -> Tensor:
    """[E] i64: the row before each target."""
    if batch.target_rows is not None:
        return batch.target_rows
    return torch.arange(len(batch.input_ids), device=batch.input_ids.device)


def _wanted(batch: PackedBatch) -> Tensor:
    """[T] bool of plain documents: the targets something is asked about."""
    if batch.value_targets is None:
        return batch.loss_mask
    return batch.loss_mask | torch.isfinite(batch.value_targets)


def _share(batch: PackedBatch, rank: int, num_ranks: int) -> int:
    """Sample tokens counted on this rank: parts of all ranks add up to those of the batch."""
    total = len(batch.input_ids) if batch.num_sample_tokens is None else batch.num_sample_tokens
    return total // num_ranks + (rank < total % num_ranks)
