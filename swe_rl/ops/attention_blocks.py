"""What a tiled attention kernel needs to know of an interval mask: which blocks of keys a block of queries touches.

Everything comes from the lowest and highest kv_end of each block of keys, on the mask's own device and without waiting
for it. Metadata is linear in T: ranges of adjacent blocks, at most MAX_RANGES of a kind for a block of queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_RANGES = 16
ROWS_AT_ONCE = 1024  # blocks of queries whose [blocks, key blocks] matrix of flags exists at a time


class KeyRanges(NamedTuple):
    """Ranges [start, stop) of key blocks for each block of queries; every visible pair lies in exactly one block of
    one range. Blocks of `full` are visible to the whole block of queries; those of `masked` need the mask."""

    full: Tensor  # [query blocks, MAX_RANGES, 2] int32
    masked: Tensor  # [query blocks, MAX_RANGES, 2] int32
    counts: Tensor  # [query blocks, 2] int32: how many ranges of each kind


def end_bounds(kv_end: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(lowest, highest) kv_end of each block of keys, [blocks] int32; keys beyond the last token do not count."""
    short = -len(kv_end) % block
    lowest = torch.nn.functional.pad(kv_end, (0, short), value=torch.iinfo(torch.int32).max)
    highest = torch.nn.functional.pad(kv_end, (0, short), value=0)
    return lowest.view(-1, block).amin(dim=1), highest.view(-1, block).amax(dim=1)


def key_ranges(kv_end: Tensor, query_block: int, key_block: int) -> KeyRanges:
    """Ranges for tiles of query_block x key_block.

    A block of queries with more than MAX_RANGES of either kind takes all its blocks under the mask, and its last range
    swallows the gaps that do not fit: more work, the same result.
    """
    tokens, device = len(kv_end), kv_end.device
    if not tokens:
        empty = torch.zeros(0, MAX_RANGES, 2, dtype=torch.int32, device=device)
        return KeyRanges(empty, empty, empty.new_zeros(0, 2))
    lowest, highest = end_bounds(kv_end, key_block)
    starts = torch.arange(0, tokens, query_block, device=device)
    parts = [
        _ranges(rows, (rows + query_block).clamp(max=tokens), lowest, highest, key_block)
        for rows in starts.split(ROWS_AT_ONCE)
    ]
    return KeyRanges(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _ranges(starts: Tensor, stops: Tensor, lowest: Tensor, highest: Tensor, key_block: int) -> KeyRanges:
    """key_ranges of the blocks of queries [starts, stops)."""
    first_key = torch.arange(len(lowest), device=starts.device) * key_block
    start, stop = starts[:, None], stops[:, None]
    live = (highest > start) & (first_key < stop)
    full = live & (first_key + key_block - 1 <= start) & (lowest >= stop)
    masked = live & ~full
    many = (_edges(full).sum(dim=1) > MAX_RANGES) | (_edges(masked).sum(dim=1) > MAX_RANGES)
    full = full & ~many[:, None]
    masked = torch.where(many[:, None], live, masked)
    found = [_encode(flags) for flags in (full, masked)]
    return KeyRanges(found[0][0], found[1][0], torch.stack([found[0][1], found[1][1]], dim=1))


def _edges(flags: Tensor) -> Tensor:
    """Where a range of set flags begins, along the last dimension."""
    edges = flags.clone()
    edges[:, 1:] &= ~flags[:, :-1]
    return edges


def _encode(flags: Tensor) -> tuple[Tensor, Tensor]:
    """(ranges [rows, MAX_RANGES, 2], counts [rows]) of flags [rows, blocks]; the last range takes all that are left."""
    number = _edges(flags).cumsum(dim=1)
    slot = (number - 1).clamp(0, MAX_RANGES - 1)
    block = torch.arange(flags.shape[1], device=flags.device).expand_as(flags)
    shape = (len(flags), MAX_RANGES)
    none = torch.iinfo(torch.int32).max
    lowest = torch.full(shape, none, dtype=torch.int64, device=flags.device)
    lowest.scatter_reduce_(1, slot, torch.where(flags, block, none), "amin")
    highest = torch.zeros(shape, dtype=torch.int64, device=flags.device)
    highest.scatter_reduce_(1, slot, torch.where(flags, block + 1, 0), "amax")
    counts = number[:, -1].clamp(max=MAX_RANGES)
    return torch.stack([lowest, highest], dim=2).int(), counts.int()
