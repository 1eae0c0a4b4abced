"""What changed between two versions of a weight, lossless: compare, apply, and a checksum that tells versions apart.

    delta = compare(old, new, update=True)     # old now equals new
    apply(receivers_copy, delta)
    assert checksum(receivers_copy) == checksum(new)

A tensor is cut into blocks of 256 elements. A delta holds how many elements of each block changed (2 bytes), and for
each of them its place in its block (1 byte) and its new value (2 bytes): 3 bytes for a changed element and 1/128 byte
for any, where a 32-bit index and a value would take 6. Blocks are independent: a GPU handles them in parallel.

The checksum is a sum over elements of a hash of number and bits, modulo 2^64: it needs no order, and checksums of the
parts of a tensor (with `first`, the number of a part's first element) add up to that of the whole. It finds lost,
misplaced and damaged values; it is no protection against somebody who wants to deceive it.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import weight_delta_native as native
from swe_rl.ops import weight_delta_reference as reference

log = logging.getLogger(__name__)

BLOCK = reference.BLOCK
MODULUS = 1 << 64
IMPLS = ("auto", "reference", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Of a tensor of `size` elements, M of which changed; on the tensor's device."""

    size: int
    counts: Tensor  # [ceil(size / BLOCK)] int16: changed elements of each block
    offsets: Tensor  # [M] uint8: their places in their blocks, ascending
    values: Tensor  # [M] of the tensor's dtype: their new values

    @property
    def num_changed(self) -> int:
        return len(self.values)

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return delta_bytes(self.size, self.num_changed)


def delta_bytes(size: int, num_changed: int) -> int:
    """Bytes of a delta of `size` elements."""
    return 2 * -(-size // BLOCK) + 3 * num_changed


def compare(old: Tensor, new: Tensor, *, update: bool = False, impl: str = "auto") -> Delta:
    """The elements of `new` whose bits differ from those of `old`; with `update`, old becomes equal to new.

    Both [any shape], contiguous, of one 16-bit dtype and device. -0.0 differs from 0.0, and NaN is equal to itself.
    impl: "auto" (the compiled code of the device where there is one), "reference" (torch), "cpu" or "cuda".
    Raises ConfigError for tensors that do not match or an impl that cannot run.
    """
    _check(old, "old")
    _check(new, "new")
    if (old.dtype, old.numel(), old.device) != (new.dtype, new.numel(), new.device):
        raise ConfigError(
            f"old is {old.dtype} [{old.numel()}] on {old.device}, new is {new.dtype} [{new.numel()}] on {new.device}: "
            "compare two versions of one tensor"
        )
    counts, offsets, values = _module(impl, old).compare(_bits(old), _bits(new), update)
    return Delta(size=old.numel(), counts=counts, offsets=offsets, values=values.view(old.dtype))


def apply(target: Tensor, delta: Delta, *, impl: str = "auto") -> None:
    """Writes the changed elements into `target` [any shape], contiguous, of the delta's size, dtype and device.

    Raises ConfigError, with nothing written, for a target that does not match or a delta that contradicts itself.
    """
    _check(target, "target")
    if (target.numel(), target.dtype) != (delta.size, delta.values.dtype):
        raise ConfigError(
            f"target is {target.dtype} [{target.numel()}], the delta is of {delta.values.dtype} [{delta.size}]"
        )
    parts = (delta.counts, delta.offsets, delta.values)
    if elsewhere := next((part.device for part in parts if part.device != target.device), None):
        raise ConfigError(f"target is on {target.device}, the delta on {elsewhere}: move one of them")
    blocks = -(-delta.size // BLOCK)
    if (delta.counts.dtype, delta.offsets.dtype) != (torch.int16, torch.uint8) or (
        (len(delta.counts), len(delta.offsets)) != (blocks, len(delta.values))
    ):
        raise ConfigError(f"the delta of {delta.size} elements has no {blocks} counts and one offset for each value")
    counts, offsets, values = (part.contiguous() for part in parts)
    if not _module(impl, target).apply(_bits(target), counts, offsets, _bits(values)):
        raise ConfigError(f"the delta of {delta.size} elements is damaged: its counts and offsets do not fit")


def checksum(values: Tensor, *, first: int = 0, impl: str = "auto") -> int:
    """In [0, 2^64). values [any shape], contiguous, of a dtype of 2 or 4 bytes; `first` counts elements of 2 bytes."""
    if not values.is_contiguous() or values.element_size() not in (2, 4):
        raise ConfigError(f"values must be contiguous and of 2 or 4 bytes an element, got {values.dtype}")
    return _module(impl, values).checksum(values.detach().view(-1).view(torch.int16), first) % MODULUS


def positions(delta: Delta) -> Tensor:
    """[M] int64: the indices of the changed elements in the flat tensor, for receivers that take plain indices."""
    return reference.positions(delta.counts, delta.offsets)


def _module(impl: str, tensor: Tensor):  # type: ignore[no-untyped-def]  # a module or an object with the same functions
    if impl not in IMPLS:
        raise ConfigError(f"impl={impl!r} is unknown: use one of {', '.join(IMPLS)}")
    device = tensor.device.type
    if impl == "reference" or (impl == "auto" and not _compiled(device)):
        return reference
    wanted = device if impl == "auto" else impl
    if wanted != device:
        raise ConfigError(f"impl={impl} cannot work on a tensor on {tensor.device}")
    ok, why = native.available(wanted)
    if not ok:
        raise ConfigError(f"impl={impl}: {why}")
    return native.library(wanted)


@functools.cache
def _compiled(device: str) -> bool:
    """Whether the compiled code of a device is used; said once."""
    ok, found = native.available(device)
    log.info("weight deltas on %s: %s", device, found if ok else f"torch, as {found}")
    return ok


def _check(tensor: Tensor, name: str) -> None:
    if not tensor.is_contiguous() or tensor.element_size() != 2:
        raise ConfigError(f"{name} must be contiguous and of a 16-bit dtype, got {tensor.dtype}")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.int16)
