"""Packed rows as the ranks of a replica see them: the tokens of a context parallel rank, and its trained targets.

Every rank of a replica works on the rows of all of them: each collects rollouts of its own, and the replica computes
their rows one after the other. Rows are padded, so that context and sequence parallel ranks get equal shares; padding
sees nothing, is seen by nobody and trains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from swe_rl.batching import empty_batch
from swe_rl.batching.cp_split import BLOCK_TOKENS, BLOCKS_PER_RANK, place_rows
from swe_rl.training import mesh
from swe_rl.training.megatron.grid import Grid
from swe_rl.training.micro_batches import to_device
from swe_rl.types import PackedBatch

NOT_TARGETS = ("input_ids", "position_ids", "cu_seqlens", "kv_end", "target_rows", "context_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One micro-batch for one rank, on its device."""

    index: int  # among the rows of the replica
    inputs: PackedBatch  # input_ids and position_ids [n] of this context parallel rank, kv_end of the whole padded row
    targets: PackedBatch  # of the trained targets [M] whose hidden states this rank has; all of them are trained
    rows: Tensor  # [M] i64: where those stand among the hidden states that the head gets
    chosen: Tensor  # [M] i64: which targets of the batch they are


def replica_rows(batches: Sequence[PackedBatch], grid: Grid) -> tuple[list[PackedBatch], list[int]]:
    """(rows of all ranks of the replica and padding, indices of this rank's own). Every rank of the run gets as many,
    under an interleaved pipeline a multiple of its ranks, as megatron-core wants it. Collective."""
    parts = _gathered(batches, grid)
    rows = [batch for _, part in parts for batch in part]
    before = 0
    own: list[int] = []
    for rank, part in parts:
        if rank == mesh.rank():
            own = list(range(before, before + len(part)))
        before += len(part)
    count = max(1, int(mesh.all_reduce_max([float(len(rows))])[0]))
    if grid.layout.virtual_pipeline > 1:
        count += -count % grid.pipeline.size
    return rows + [empty_batch()] * (count - len(rows)), own


def _gathered(batches: Sequence[PackedBatch], grid: Grid) -> list[tuple[int, list[PackedBatch]]]:
    """(rank, its batches) of the replica, in the order of ranks."""
    size = torch.distributed.get_world_size(grid.replica)
    if size == 1:
        return [(mesh.rank(), list(batches))]
    parts: list[Any] = [None] * size
    torch.distributed.all_gather_object(parts, (mesh.rank(), list(batches)), group=grid.replica)
    return parts


def rank_row(batch: PackedBatch, index: int, grid: Grid, *, scoring: bool) -> RankRow:
    """The share of this rank. Under sequence parallelism the targets of training are those of its own tokens, while
    `scoring` gathers hidden states first."""
    size, kv_end = len(batch.input_ids), padded_ends(batch.kv_end, grid)
    padding = len(kv_end) - size
    ids, positions = (torch.nn.functional.pad(column, (0, padding)) for column in (batch.input_ids, batch.position_ids))
    mine, placement = torch.arange(len(kv_end)), None
    if grid.context.size > 1:
        block = max(1, BLOCK_TOKENS // grid.tensor.size) * grid.tensor.size
        placement, kv_end = place_rows(kv_end, num_ranks=grid.context.size, block_tokens=block)
        mine = placement[grid.context.rank]
        ids, positions = (torch.nn.functional.pad(c, (0, len(kv_end) - len(c))) for c in (ids, positions))
    place = torch.full((len(kv_end),), -1, dtype=torch.int64)
    place[mine] = torch.arange(len(mine))
    low, high = 0, len(mine)
    if grid.sequence_parallel and not scoring:
        share = len(mine) // grid.tensor.size
        low, high = grid.tensor.rank * share, (grid.tensor.rank + 1) * share
    trained = batch.loss_mask.nonzero(as_tuple=True)[0]
    of_target = torch.arange(size) if batch.target_rows is None else batch.target_rows
    rows = place[of_target[trained]]
    here = (rows >= low) & (rows < high)
    real = int((mine[low:high] < size).sum())
    inputs = replace(batch, input_ids=ids[mine], position_ids=positions[mine], kv_end=kv_end, context_rows=placement)
    targets = replace(_targets(batch, trained[here], num_tokens=real, of=size), context_rows=placement)
    return RankRow(
        index=index,
        inputs=to_device(inputs, grid.device),
        targets=to_device(targets, grid.device),
        rows=(rows[here] - low).to(grid.device),
        chosen=trained[here],
    )


def padded_ends(kv_end: Tensor, grid: Grid) -> Tensor:
    """kv_end of the row, padded to a length that all ranks get equal shares of."""
    multiple = grid.tensor.size * (grid.context.size * BLOCKS_PER_RANK if grid.context.size > 1 else 1)
    length = -(-len(kv_end) // multiple) * multiple
    return torch.cat([kv_end, torch.arange(len(kv_end), length, dtype=kv_end.dtype)])


def _targets(batch: PackedBatch, chosen: Tensor, *, num_tokens: int, of: int) -> PackedBatch:
    """Columns of the chosen targets; input_ids has as many tokens as this rank computes, for the statistics."""
    columns: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor) and field.name not in NOT_TARGETS:
            columns[field.name] = value[chosen]
    before = of if batch.num_sample_tokens is None else batch.num_sample_tokens
    share = before * num_tokens // max(of, 1) if any(batch.trajectory_ids) else 0
    return replace(batch, **columns, input_ids=batch.input_ids[:num_tokens], target_rows=None, num_sample_tokens=share)
