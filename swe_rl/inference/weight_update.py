"""How new weights reach an engine: start, any number of buckets, finish. The records that travel, and who takes them.

    plan = UpdatePlan(version=8, base_version=7, stream=..., dtype="bfloat16", shapes=...)
    if await engine.start_weight_update(plan):      # False: it does not hold version 7, send everything
        await engine.receive_weights(bucket)        # some pieces of some tensors, each dense or a delta
        wrong = await engine.finish_weight_update(checksums)    # names whose bits are not the trainer's

Tensors go by their Hugging Face names, flat and in one dtype. A bucket has a bounded size, so neither side ever holds a
second copy of a model that does not fit twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from swe_rl.errors import ConfigError, EngineError
from swe_rl.ops import weight_delta
from swe_rl.ops.weight_delta import Delta

IN_FLIGHT = ("pause", "keep", "abort")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """What is about to come.

    in_flight says what becomes of requests that run meanwhile. "pause": they stand still until the update is finished,
    then go on with the new weights. "keep": they go on with the old weights while the new ones arrive aside, and
    change over between two tokens. "abort": they end with EngineError. Whatever it is, keys and values of the old
    weights are never used again.
    """

    version: int
    base_version: int | None  # a delta: the version that it is a difference to; None: everything is sent
    stream: str  # of one publisher: equal version numbers of another one are other weights
    dtype: str  # of all values, a name in DTYPES
    shapes: Mapping[str, tuple[int, ...]]  # of all tensors, whether something of them is sent or not
    in_flight: str = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPiece:
    """Elements [first, first + size) of one flat tensor."""

    name: str
    first: int
    values: Tensor | Delta  # dense [size], or what changed among these

    @property
    def size(self) -> int:
        return self.values.size if isinstance(self.values, Delta) else self.values.numel()

    @property
    def num_bytes(self) -> int:
        own = self.values
        return own.num_bytes if isinstance(own, Delta) else own.numel() * own.element_size()

    @property
    def num_changed(self) -> int:
        return self.values.num_changed if isinstance(self.values, Delta) else self.size


@dataclass(frozen=True, slots=True)
class WeightBucket:
    pieces: tuple[WeightPiece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


class WeightReceiver(Protocol):
    """An engine whose weights can be replaced while it lives. Calls come one at a time, in the order above."""

    async def start_weight_update(self, plan: UpdatePlan) -> bool:
        """Whether the plan suits: False, and nothing has changed, if it is a delta to weights that are not here.

        An update that was started and not finished is forgotten. Raises EngineError for tensors of another model.
        """
        ...

    async def receive_weights(self, bucket: WeightBucket) -> None: ...

    async def finish_weight_update(self, checksums: Mapping[str, int]) -> list[str]:
        """[] when every tensor has its checksum (ops.weight_delta.checksum) and the new version is in use. Otherwise
        the names that have not, and the engine stands still until a whole update has come."""
        ...


class WeightInbox:
    """Takes updates into `targets`, contiguous tensors of any shape by name, and knows which version they hold."""

    def __init__(self, targets: Mapping[str, Tensor]) -> None:
        self.targets = targets
        self._flat = {name: tensor.detach().view(-1) for name, tensor in targets.items()}
        self._held: tuple[str, int] | None = None  # (stream, version), verified
        self._plan: UpdatePlan | None = None
        self._damaged: set[str] = set()

    def start(self, plan: UpdatePlan) -> bool:
        """As WeightReceiver.start_weight_update."""
        self._check(plan)
        if plan.base_version is not None and self._held != (plan.stream, plan.base_version):
            return False
        self._plan, self._damaged = plan, set()
        return True

    def receive(self, bucket: WeightBucket) -> None:
        """Writes a bucket. A piece that contradicts itself is left out: `finish` will name its tensor."""
        if self._plan is None:
            raise EngineError("weights came without an update that was started")
        self._held = None  # until `finish` has seen that all is well
        for piece in bucket.pieces:
            target = self._flat[piece.name][piece.first : piece.first + piece.size]
            if len(target) != piece.size:
                self._damaged.add(piece.name)
            elif isinstance(piece.values, Delta):
                self._apply(piece.name, target, piece.values)
            else:
                target.copy_(piece.values)

    def _apply(self, name: str, target: Tensor, delta: Delta) -> None:
        try:
            weight_delta.apply(target, moved(delta, target.device))
        except ConfigError:
            self._damaged.add(name)

    def finish(self, checksums: Mapping[str, int]) -> list[str]:
        """As WeightReceiver.finish_weight_update."""
        if self._plan is None:
            raise EngineError("an update was finished that was not started")
        wrong = [n for n, t in self._flat.items() if n in self._damaged or weight_delta.checksum(t) != checksums.get(n)]
        self._held = None if wrong else (self._plan.stream, self._plan.version)
        self._plan = None
        return wrong

    def checksums(self, sent: Mapping[str, int]) -> Mapping[str, int]:
        """Of the engine's weights after a `finish` that found nothing wrong with the trainer's: the same ones."""
        return sent

    def forget(self) -> None:
        """The targets were changed from elsewhere: no delta fits them any more."""
        self._held = None

    def _check(self, plan: UpdatePlan) -> None:
        own = {name: tuple(tensor.shape) for name, tensor in self.targets.items()}
        sent = {name: tuple(shape) for name, shape in plan.shapes.items()}
        wrong = sorted(name for name in {**own, **sent} if own.get(name) != sent.get(name))
        if wrong:
            name = wrong[0]
            raise EngineError(
                f"weight update: {name} is {sent.get(name)} in the trainer, {own.get(name)} in the engine"
            )
        other = {tensor.dtype for tensor in self.targets.values()} - {DTYPES[plan.dtype]}
        if other:
            raise EngineError(f"weight update: values come as {plan.dtype}, the engine holds {other.pop()}")


def moved(delta: Delta, device: torch.device) -> Delta:
    """The delta on `device`."""
    if delta.values.device == device:
        return delta
    parts = (delta.counts, delta.offsets, delta.values)
    # A copy to the host that does not wait would be read before it is complete.
    counts, offsets, values = (part.to(device, non_blocking=device.type != "cpu") for part in parts)
    return Delta(size=delta.size, counts=counts, offsets=offsets, values=values)


def packed(bucket: WeightBucket) -> tuple[list[tuple[Any, ...]], Tensor]:
    """(one tuple of plain values a piece, all bytes as uint8 [n]): a bucket for a wire. `unpacked` reads it."""
    meta: list[tuple[Any, ...]] = []
    wide: list[Tensor] = []  # what needs to lie at even places comes first
    narrow: list[Tensor] = []
    for piece in bucket.pieces:
        own = piece.values
        if isinstance(own, Delta):
            meta.append((piece.name, piece.first, str(own.values.dtype)[6:], len(own.values), own.size))
            wide += [own.values, own.counts]
            narrow.append(own.offsets)
        else:
            meta.append((piece.name, piece.first, str(own.dtype)[6:], own.numel(), -1))
            wide.append(own)
    flat = [part.detach().reshape(-1).view(torch.uint8) for part in (*wide, *narrow)]
    return meta, torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def unpacked(meta: Sequence[tuple[Any, ...]], payload: Tensor) -> WeightBucket:
    """The bucket whose `packed` this is; its tensors are views of `payload`."""
    reader = _Reader(payload)
    wide: list[tuple[Tensor, Tensor | None]] = []
    for _, _, dtype, count, size in meta:
        values = reader.take(count, DTYPES[dtype])
        wide.append((values, None if size < 0 else reader.take(-(-size // weight_delta.BLOCK), torch.int16)))
    pieces = []
    for (name, first, _, count, size), (values, counts) in zip(meta, wide, strict=True):
        own: Tensor | Delta = values
        if counts is not None:
            own = Delta(size=size, counts=counts, offsets=reader.take(count, torch.uint8), values=values)
        pieces.append(WeightPiece(name=name, first=first, values=own))
    return WeightBucket(tuple(pieces))


class _Reader:
    def __init__(self, payload: Tensor) -> None:
        self._payload, self._at = payload, 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """The next `count` values."""
        start = self._at
        self._at += count * dtype.itemsize
        return self._payload[start : self._at].view(dtype)
