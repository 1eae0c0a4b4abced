"""The sender's side of a weight update from Megatron ranks: Hugging Face tensors, bucket by bucket.

The parts of one bucket are gathered over the replica in the engines' dtype, so that no rank ever holds more of the
whole model than a bucket. What changed since the last update each rank looks up in its own share of every tensor (an
equal range of elements), and what was found is exchanged: memory for the comparison is spread over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swe_rl.inference.weight_update import WeightBucket, WeightPiece
from swe_rl.ops.weight_delta import BLOCK
from swe_rl.training import mesh
from swe_rl.training.megatron.convert_units import Unit
from swe_rl.training.weight_source import LocalShard, Slice, SyncTotals, WeightSource

if TYPE_CHECKING:
    from swe_rl.training.megatron.backend import MegatronBackend


class ReplicaWeightSource(WeightSource):
    """As WeightSource, of a MegatronBackend. bucket_bytes bounds the whole tensors of a bucket; a larger tensor is a
    bucket of its own."""

    def __init__(self, backend: MegatronBackend, *, dtype: str, bucket_bytes: int, remember: bool) -> None:
        super().__init__({}, dtype=dtype, bucket_bytes=bucket_bytes, remember=False)
        self.backend, self.sharded = backend, mesh.world_size() > 1
        parameters = backend.exchange.parameters
        self.shapes, self._spans = parameters.shapes, parameters.spans
        units = [unit for group in parameters.groups for unit in group]
        counts = {name: math.prod(size) for name, size in parameters.sizes.items()}
        room = bucket_bytes // self.dtype.itemsize
        self.unit_plan = unit_buckets(units, [sum(counts[name] for name in unit.hf) for unit in units], room)
        self._kept: dict[str, Tensor] = {}  # what the engines hold of this rank's shares, by the names of files
        if remember:
            shares = {name: own_share(count) for name, count in counts.items()}
            self._kept = {
                name: torch.empty(share.stop - share.start, dtype=self.dtype, device=backend.device)
                for name, share in shares.items()
            }

    def buckets(self, totals: SyncTotals, *, delta: bool) -> Iterator[WeightBucket]:
        """As WeightSource.buckets. Collective: every rank takes every bucket."""
        totals.checksums.update(dict.fromkeys(self.shapes, 0))
        for units in self.unit_plan:
            tensors = {name: tensor for unit in units for name, tensor in self._whole(unit).items()}
            own = [piece for name, tensor in tensors.items() if (piece := self._share(name, tensor, totals, delta))]
            if delta and self.sharded:
                yield self._gathered(WeightBucket(tuple(own)))
            elif delta:
                yield WeightBucket(tuple(own))
            else:
                spans = {name: self._spans[name] for name in tensors}
                whole = (WeightPiece(name=at.name, first=at.first, values=tensors[name]) for name, at in spans.items())
                yield WeightBucket(tuple(whole))
        self._add_up(totals)

    @torch.no_grad()
    def _whole(self, unit: Unit) -> dict[str, Tensor]:
        """Flat tensors of a unit in the engines' dtype, rounded from the masters."""
        backend = self.backend
        part, value = backend.exchange.part(unit), None
        if part is not None:
            shard = backend.masters.masters[part.key].detach().to(self.dtype)
            value = backend.masters.whole_of(part, shard)
        tensors = backend.exchange.whole(unit, value, dtype=self.dtype)
        return {name: tensor.reshape(-1) for name, tensor in zip(unit.hf, tensors, strict=True)}

    def _share(self, name: str, tensor: Tensor, totals: SyncTotals, delta: bool) -> WeightPiece | None:
        """The piece of this rank's share, compared and counted."""
        at, share = self._spans[name], own_share(len(tensor))
        size, shape, first = share.stop - share.start, self.shapes[at.name], at.first + share.start
        if self._kept:
            self._sent = {at.name: self._kept[name]}
        self.shards[at.name] = LocalShard(tensor[share], first, shape, size)
        piece = self._piece(Slice(at.name, 0, size), totals, delta=delta)
        # Kept, its values would be a view that holds the whole tensor: after the last bucket, the whole model.
        self.shards[at.name] = LocalShard(tensor.new_empty(0), first, shape, size)
        return piece


def own_share(size: int) -> slice:
    """This rank's elements of a tensor of `size`: equal shares of whole blocks, the last ones shorter or empty."""
    each = -(-size // (mesh.world_size() * BLOCK)) * BLOCK
    return slice(min(mesh.rank() * each, size), min((mesh.rank() + 1) * each, size))


def unit_buckets(units: list[Unit], sizes: list[int], room: int) -> list[list[Unit]]:
    """Consecutive units with at most `room` elements together, at least one each."""
    plan: list[list[Unit]] = []
    left = 0
    for unit, size in zip(units, sizes, strict=True):
        if not plan or size > left:
            plan.append([])
            left = room
        plan[-1].append(unit)
        left -= size
    return plan
