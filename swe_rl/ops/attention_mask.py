"""The one definition of who sees whom: one int32 `kv_end` per key, key k is visible to queries k <= q < kv_end[k].

Packed documents have their end, nodes of a tree (in depth-first order) the end of their subtree, padding has
kv_end[k] = k and is seen by nobody. This module turns such a mask into rectangles and causal squares on the host.
Indices say who is visible; positions (for RoPE) are a separate input of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_ROWS = 256  # of the plan in blocks
MASKED_KEYS = 4096  # at most, of one masked tile: the mask is a matrix
# Costs in units of one visible (query, key) pair of one head, measured on a CPU with head_dim 64.
CALL_COST = 8192.0  # one more tile
ROW_COST = 16.0  # one query row that is merged with what earlier tiles gave it
MASKED_COST = 2.0  # a pair under a mask


class Run(NamedTuple):
    """Adjacent keys [start, stop) with one kv_end: a causal square, and a rectangle below it down to row `end`."""

    start: int
    stop: int
    end: int


class Tile(NamedTuple):
    """Queries and keys of one call. `kind`: full (all pairs), causal (square), masked (the interval mask decides).

    `fresh`: no earlier tile of the plan has these rows.
    """

    rows: slice
    keys: slice | Tensor  # [n] i64 where they are not adjacent
    kind: str
    fresh: bool


def dense_mask(kv_end: Tensor) -> Tensor:
    """[T, T] bool by the definition, rows are queries; for references and tests."""
    index = torch.arange(len(kv_end), device=kv_end.device)
    return (index[None, :] <= index[:, None]) & (index[:, None] < kv_end[None, :])


def runs(kv_end: Tensor) -> list[Run]:
    """The runs of visible keys in order; kv_end [T] on the host, valid (k <= kv_end[k] <= T)."""
    ends = kv_end.long()
    live = ends > torch.arange(len(ends))
    new = torch.ones_like(live)
    new[1:] = (ends[1:] != ends[:-1]) | (live[1:] != live[:-1])
    starts = new.nonzero()[:, 0]
    stops = torch.cat([starts[1:], starts.new_tensor([len(ends)])])[: len(starts)]
    keep = live[starts]
    columns = (column[keep].tolist() for column in (starts, stops, ends[starts]))
    return [Run(*run) for run in zip(*columns, strict=True)]


def documents(found: list[Run]) -> bool:
    """Whether the runs are plain causal documents, packed one after the other."""
    return all(run.end == run.stop for run in found)


def plan(kv_end: Tensor) -> list[Tile]:
    """Tiles that cover every visible pair once, by runs or by blocks of rows, whichever costs less.

    Needs memory linear in T: no tile has a mask of more than BLOCK_ROWS x MASKED_KEYS.
    """
    found = runs(kv_end)
    squares = sum(CALL_COST + 0.5 * (run.stop - run.start) ** 2 for run in found)
    deep = [run for run in found if run.end > run.stop]
    rows = sum(run.end - run.stop for run in deep)
    rectangles = sum((run.end - run.stop) * (run.stop - run.start) for run in deep)
    by_runs = squares + len(deep) * CALL_COST + rows * ROW_COST + rectangles
    near = len(kv_end) * BLOCK_ROWS
    by_blocks = 0.5 * near + rectangles + MASKED_COST * near + len(kv_end) * (2 * CALL_COST / BLOCK_ROWS + ROW_COST)
    return list(run_tiles(found) if by_runs <= by_blocks else block_tiles(kv_end))


def run_tiles(found: list[Run]) -> Iterator[Tile]:
    """Each run's square, and its rectangle if it has one. Rows from `reached` on are fresh."""
    reached = 0
    for run in found:
        own = slice(run.start, run.stop)
        yield Tile(own, own, "causal", run.start >= reached)
        if run.end > run.stop:
            yield Tile(slice(run.stop, run.end), own, "full", run.stop >= reached)
            reached = max(reached, run.end)


def block_tiles(kv_end: Tensor) -> Iterator[Tile]:
    """For each block of rows the keys that all of it sees, then those that only a part sees, under the mask."""
    ends = kv_end.long()
    index = torch.arange(len(ends))
    live = ends > index
    for start in range(0, len(ends), BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, len(ends))
        before, fresh = ends[:stop], True
        whole = (before >= stop) & (index[:stop] < start)
        for keys in _chunks(whole.nonzero()[:, 0], len(ends)):
            yield Tile(slice(start, stop), keys, "full", fresh)
            fresh = False
        part = (before > start) & live[:stop] & ~whole
        for keys in _chunks(part.nonzero()[:, 0], MASKED_KEYS):
            yield Tile(slice(start, stop), keys, "masked", fresh)
            fresh = False


def _chunks(keys: Tensor, size: int) -> Iterator[slice | Tensor]:
    """At most `size` keys at a time, as slices where they are adjacent."""
    for chunk in keys.split(size) if len(keys) else ():
        first, last = int(chunk[0]), int(chunk[-1])
        yield slice(first, last + 1) if last - first + 1 == len(chunk) else chunk


def tile_mask(tile: Tile, kv_end: Tensor) -> Tensor:
    """[rows, keys] bool of a masked tile."""
    index = torch.arange(len(kv_end), device=kv_end.device)
    query, key = index[tile.rows, None], index[tile.keys][None, :]
    return (key <= query) & (query < kv_end[tile.keys].long()[None, :])
