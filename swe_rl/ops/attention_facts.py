"""What the implementations of attention derive from one interval mask, made once for all layers of a batch."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from swe_rl.ops.attention_blocks import KeyRanges, end_bounds, key_ranges
from swe_rl.ops.attention_levels import Level, levels
from swe_rl.ops.attention_mask import Run, Tile, plan, runs


class MaskFacts:
    """Each fact is made when it is first asked for. Only `host` and what builds on it waits for the device."""

    def __init__(self, kv_end: Tensor) -> None:
        self.given = kv_end  # kept, see LatestMask
        self.kv_end = kv_end.detach().contiguous()
        self._ranges: dict[tuple[int, int], KeyRanges] = {}
        self._bounds: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def host(self) -> Tensor:
        """kv_end on the CPU."""
        return self.kv_end.cpu()

    @cached_property
    def runs(self) -> list[Run]:
        return runs(self.host)

    @cached_property
    def tiles(self) -> list[Tile]:
        """The plan of the CPU."""
        return plan(self.host)

    @cached_property
    def levels(self) -> list[Level] | None:
        """Calls of a kernel for packed sequences, None where runs do not nest."""
        return levels(self.runs, self.kv_end.device)

    def ranges(self, query_block: int, key_block: int) -> KeyRanges:
        """attention_blocks.key_ranges."""
        key = (query_block, key_block)
        if key not in self._ranges:
            self._ranges[key] = key_ranges(self.kv_end, query_block, key_block)
        return self._ranges[key]

    def bounds(self, key_block: int) -> tuple[Tensor, Tensor]:
        """attention_blocks.end_bounds."""
        if key_block not in self._bounds:
            self._bounds[key_block] = end_bounds(self.kv_end, key_block)
        return self._bounds[key_block]


class LatestMask:
    """Remembers the facts of the last mask, as every layer of a model is called with the same one.

    The mask itself is kept alive, so that its address cannot become another's; a write to it changes its version. The
    stream belongs to the key: facts made on one stream need not be finished when another reads them.
    """

    def __init__(self) -> None:
        self._latest: tuple[tuple[object, ...], MaskFacts] | None = None

    def facts(self, kv_end: Tensor) -> MaskFacts:
        """Those of kv_end, made anew unless it is the same memory as the last time."""
        if kv_end.is_inference():  # has no version
            return MaskFacts(kv_end)
        stream = torch.cuda.current_stream(kv_end.device).cuda_stream if kv_end.is_cuda else 0
        key = (kv_end.data_ptr(), kv_end.device, len(kv_end), kv_end.stride(), kv_end._version, stream)
        latest = self._latest
        if latest is None or latest[0] != key:
            latest = self._latest = (key, MaskFacts(kv_end))
        return latest[1]
