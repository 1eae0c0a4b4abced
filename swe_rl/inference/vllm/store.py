"""The published weights in shared memory: updates are written there, replicas load from there, also restarted ones.

One file, mapped: flat tensors behind one another. Which tensor lies where travels as plain numbers (`location`), so
that it can be an argument of vLLM's update_weights.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Size, Tensor

from swe_rl.errors import EngineError, InvariantError
from swe_rl.inference.vllm.owner import LOCKED, remove_unlocked
from swe_rl.ops.weight_delta import checksum

log = logging.getLogger(__name__)

ALIGN = 64  # bytes: where a tensor may begin
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "swe-rl-weights-"
SETTLED_S = 60.0  # age from which an unlocked folder is nobody's
MAX_SHARE = 0.8  # of the free shared memory that the weights may take


class WeightStore:
    """One version of all parameters, by Hugging Face name, in the engine's dtype. `close` removes the file."""

    def __init__(self, shapes: Mapping[str, Size], *, dtype: str) -> None:
        """Raises OSError when there is no room."""
        self._dtype = getattr(torch, dtype)
        self._starts, size = _places(shapes, self._dtype)
        size = max(size, 1)
        sweep()
        self._folder, self._lock = _reserved(size)
        self.path = self._folder / LOCKED
        flat = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        self.targets: dict[str, Tensor] = {
            name: _view(flat, self._starts[name], tuple(shape), self._dtype) for name, shape in shapes.items()
        }

    def copy(self, weights: Mapping[str, Tensor]) -> dict[str, int]:
        """Takes all weights, rounded to the engine's dtype, and returns their checksums. They must have passed
        `check`."""
        for name, tensor in weights.items():
            self.targets[name].copy_(tensor.detach())
        return {name: checksum(tensor) for name, tensor in self.targets.items()}

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raises EngineError for the weights of another model."""
        unknown, missing = sorted(set(weights) - set(self.targets)), sorted(set(self.targets) - set(weights))
        if unknown or missing:
            raise EngineError(f"weight update: unknown names {unknown[:3]}, missing names {missing[:3]}")
        for name, tensor in weights.items():
            if tensor.shape != self.targets[name].shape:
                raise EngineError(
                    f"weight update: {name} has shape {tuple(tensor.shape)}, not {tuple(self.targets[name].shape)}"
                )

    def location(self, checksums: Mapping[str, int], *, version: int) -> dict[str, Any]:
        """What a worker needs to read this version: arguments of `read_tensors`."""
        tensors = [
            [name, list(tensor.shape), str(self._dtype)[6:], self._starts[name], str(checksums[name])]
            for name, tensor in self.targets.items()
        ]  # checksums as text: JSON has no integers of 64 bits
        return {"path": str(self.path), "version": version, "tensors": tensors}

    def close(self) -> None:
        """Idempotent. Whoever has the file mapped keeps what is in it."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()


def read_tensors(path: str, tensors: Sequence[Sequence[Any]], *, version: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) one by one, each a view of the mapped file. Raises InvariantError for bits that are not those that
    were published."""
    size = Path(path).stat().st_size
    flat = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    for name, shape, dtype, start, expected in tensors:
        tensor = _view(flat, start, tuple(shape), getattr(torch, dtype))
        if checksum(tensor) != int(expected):
            raise InvariantError(f"{name} of version {version} of the weights is not what was published: {path}")
        yield name, tensor


def _places(shapes: Mapping[str, Size], dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """(first byte of each tensor, bytes in all)."""
    starts, size = {}, 0
    for name, shape in shapes.items():
        starts[name] = size
        size += -(-Size(shape).numel() * dtype.itemsize // ALIGN) * ALIGN
    return starts, size


def _view(flat: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = Size(shape).numel() * dtype.itemsize
    return flat[start : start + size].view(dtype).view(shape)


def sweep() -> None:
    """Removes the weights of processes that were killed: the lock on a file ends with whoever wrote it."""
    for place in {SHARED_MEMORY, Path(tempfile.gettempdir())}:
        for folder in place.glob(f"{PREFIX}*"):
            try:
                settled = time.time() - folder.stat().st_mtime > SETTLED_S
            except OSError:  # gone meanwhile
                continue
            if settled and remove_unlocked(folder):
                log.warning("removed %s, left behind by a process that was killed", folder)


def _reserved(num_bytes: int) -> tuple[Path, IO[bytes]]:
    """A new folder and, locked, its file LOCKED, which has all its bytes: a mapping of a file that only says it is so
    large would end the process when it is written to and the room is gone, to the weights of other ranks for one."""
    for place in (_shared_memory(num_bytes), None):  # None: the ordinary place for temporary files
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        file = open(folder / LOCKED, "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError:
            file.close()
            shutil.rmtree(folder, ignore_errors=True)
            if place is None:
                raise
            continue
        log.info("weights for the engine: %.2f GiB in %s", num_bytes / 2**30, folder)
        return folder, file
    raise AssertionError("unreachable")


def _shared_memory(num_bytes: int) -> Path | None:
    """Its folder if it has room."""
    if SHARED_MEMORY.is_dir() and num_bytes < MAX_SHARE * shutil.disk_usage(SHARED_MEMORY).free:
        return SHARED_MEMORY
    return None
