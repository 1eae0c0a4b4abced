"""The sender's side of a weight update: this rank's shards, what of them changed since the last one, bucket by bucket.

A shard is compared where it lies, with the bf16 values that were sent last, and only what changed is gathered from the
other ranks. No rank ever holds a whole tensor, let alone a whole model, that it did not hold before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from swe_rl.errors import InvariantError
from swe_rl.inference.weight_update import DTYPES, WeightBucket, WeightPiece, packed, unpacked
from swe_rl.ops import weight_delta
from swe_rl.ops.weight_delta import BLOCK, MODULUS, Delta
from swe_rl.training import mesh

ALIGNMENT = 16  # bytes that every rank's part of a gathered bucket is padded to


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Elements [first, first + len(values)) of a tensor, flat, as the trainer holds them; live, not a copy."""

    values: Tensor
    first: int
    shape: tuple[int, ...]  # of the whole tensor
    largest: int  # elements of the largest shard of any rank


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, stop) of every rank's shard of one tensor; a shorter shard has fewer of them, or none."""

    name: str
    start: int
    stop: int


@dataclass(slots=True)
class SyncTotals:
    """Of one update. Elements and bytes are of all ranks; full_bytes is what a dense update takes."""

    num_elements: int = 0
    num_changed: int = 0
    sent_bytes: int = 0
    full_bytes: int = 0
    checksums: dict[str, int] = field(default_factory=dict)


class WeightSource:
    """Makes the buckets of updates from `params` (masters by Hugging Face name; sharded ones along dimension 0).

    `remember` keeps what was sent last (this rank's shards in `dtype`), which deltas are taken against. bucket_bytes
    bounds a bucket that holds everything of its tensors; deltas fill less. Raises InvariantError for another sharding.
    """

    def __init__(self, params: Mapping[str, Tensor], *, dtype: str, bucket_bytes: int, remember: bool) -> None:
        self.dtype = DTYPES[dtype]
        self.params = dict(params)
        self.shards = {name: local_shard(param) for name, param in params.items()}
        self.sharded = any(isinstance(param, DTensor) for param in params.values())
        self.shapes = {name: shard.shape for name, shard in self.shards.items()}
        self.plan = bucket_plan(
            {name: shard.largest for name, shard in self.shards.items()},
            per_bucket=max(bucket_bytes // self.dtype.itemsize // self._num_parts, BLOCK),
        )
        self._sent: dict[str, Tensor] = {}  # of this rank's shards, what the engines hold
        if remember:
            self._sent = {n: torch.empty_like(s.values, dtype=self.dtype) for n, s in self.shards.items()}

    @property
    def _num_parts(self) -> int:
        return mesh.world_size() if self.sharded else 1

    def buckets(self, totals: SyncTotals, *, delta: bool) -> Iterator[WeightBucket]:
        """All buckets of the present weights, filling `totals` on the way; complete when the last one was taken.

        delta: against what the last call sent. Collective when sharded: every rank takes every bucket.
        """
        self.shards = {name: local_shard(param) for name, param in self.params.items()}
        totals.checksums.update(dict.fromkeys(self.shards, 0))
        for slices in self.plan:
            own = [piece for part in slices if (piece := self._piece(part, totals, delta=delta)) is not None]
            bucket = WeightBucket(tuple(own))
            yield self._gathered(bucket) if self.sharded else bucket
        self._add_up(totals)

    def _piece(self, part: Slice, totals: SyncTotals, *, delta: bool) -> WeightPiece | None:
        shard = self.shards[part.name]
        fresh = shard.values[part.start : part.stop].detach().to(self.dtype)
        if not len(fresh):
            return None
        first, units = shard.first + part.start, self.dtype.itemsize // 2  # checksums count elements of 2 bytes
        values: Tensor | Delta = fresh
        if self._sent:
            last = self._sent[part.name][part.start : part.stop]
            if delta:
                changed = weight_delta.compare(last, fresh, update=True)
                values = changed if changed.num_bytes < 2 * len(fresh) else fresh
            else:
                last.copy_(fresh)
        piece = WeightPiece(name=part.name, first=first, values=values)
        checksum = weight_delta.checksum(fresh, first=first * units)
        totals.checksums[part.name] = (totals.checksums[part.name] + checksum) % MODULUS
        totals.num_elements += len(fresh)
        totals.full_bytes += len(fresh) * self.dtype.itemsize
        totals.num_changed += piece.num_changed
        totals.sent_bytes += piece.num_bytes
        return piece

    def _gathered(self, own: WeightBucket) -> WeightBucket:
        """The pieces of all ranks, on every rank."""
        meta, payload = packed(own)
        device = next(iter(self.shards.values())).values.device
        described = mesh.gather_objects([(meta, len(payload))])
        longest = max(length for _, length in described)
        longest += -longest % ALIGNMENT
        mine = torch.zeros(longest, dtype=torch.uint8, device=device)
        mine[: len(payload)] = payload
        parts = [torch.empty_like(mine) for _ in described]
        dist.all_gather(parts, mine)
        found = [unpacked(described[rank][0], part) for rank, part in enumerate(parts)]
        return WeightBucket(tuple(piece for bucket in found for piece in bucket.pieces))

    def _add_up(self, totals: SyncTotals) -> None:
        """Of all ranks, where each has seen its shards only."""
        if not self.sharded:
            return
        everyone: list[SyncTotals] = mesh.gather_objects([totals])
        totals.checksums = {name: sum(own.checksums[name] for own in everyone) % MODULUS for name in self.shards}
        totals.num_elements = sum(own.num_elements for own in everyone)
        totals.num_changed = sum(own.num_changed for own in everyone)
        totals.sent_bytes = sum(own.sent_bytes for own in everyone)
        totals.full_bytes = sum(own.full_bytes for own in everyone)


def local_shard(param: Tensor) -> LocalShard:
    """This rank's part of a parameter. Raises InvariantError unless that is one range of its elements."""
    if not isinstance(param, DTensor):
        flat = param.detach().view(-1)
        return LocalShard(flat, 0, tuple(param.shape), len(flat))
    if param.device_mesh.ndim != 1 or param.placements != (Shard(0),):
        raise InvariantError(f"weight sync knows shards along dimension 0, not {param.placements}")
    row = param.numel() // max(param.shape[0], 1)
    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    largest = -(-param.shape[0] // param.device_mesh.size()) * row
    return LocalShard(param.to_local().detach().view(-1), offset[0] * row, tuple(param.shape), largest)


def bucket_plan(sizes: Mapping[str, int], *, per_bucket: int) -> list[list[Slice]]:
    """Slices of at most `per_bucket` elements together, in the order of `sizes` (elements by name).

    A tensor is cut only where a bucket is full, at a multiple of BLOCK. The same on every rank.
    """
    plan: list[list[Slice]] = []
    room = 0
    for name, size in sizes.items():
        start = 0
        while start < size:
            if room < min(size - start, BLOCK):
                plan.append([])
                room = per_bucket
            stop = start + room - room % BLOCK if size - start > room else size
            plan[-1].append(Slice(name, start, stop))
            room -= stop - start
            start = stop
    return plan
