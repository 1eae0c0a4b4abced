"""csrc/ops/weight_delta.cpp and weight_delta.cu behind the functions of weight_delta_reference.

The CPU code runs in one thread and lets other Python threads run meanwhile. The GPU code runs on the current stream.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swe_rl.ops.cpu_rows import LEVELS, LIBRARIES
from swe_rl.ops.weight_delta_reference import BLOCK

POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64


def available(device: str) -> tuple[bool, str]:
    """Whether there is compiled code for "cpu" or "cuda", and what to do if not."""
    path = library_path(device)
    if path is not None:
        return True, path.name
    flag = "" if device == "cpu" else " with SWE_RL_CUDA=1 and nvcc"
    return False, f"the compiled code of weight_delta is not built: reinstall swe-rl{flag}"


def library_path(device: str) -> Path | None:
    """The best build that this machine can load."""
    builds = (*LEVELS.get(torch.backends.cpu.get_cpu_capability(), ()), "default") if device == "cpu" else (device,)
    return next((path for build in builds if (path := LIBRARIES / f"libweight_delta-{build}.so").exists()), None)


@functools.cache
def library(device: str) -> CpuDelta | CudaDelta:
    """Loads it; `available` must have said yes."""
    path = library_path(device)
    assert path is not None
    return CpuDelta(path) if device == "cpu" else CudaDelta(path)


class CpuDelta:
    def __init__(self, path: Path) -> None:
        self._library: Any = ctypes.CDLL(str(path))
        self._library.swe_rl_delta_compare.argtypes = [
            POINTER,
            POINTER,
            NUMBER,
            ctypes.c_int,
            POINTER,
            POINTER,
            POINTER,
        ]
        self._library.swe_rl_delta_compare.restype = NUMBER
        self._library.swe_rl_delta_apply.argtypes = [POINTER, NUMBER, POINTER, POINTER, POINTER, NUMBER]
        self._library.swe_rl_delta_checksum.argtypes = [POINTER, NUMBER, NUMBER]
        self._library.swe_rl_delta_checksum.restype = ctypes.c_uint64

    def compare(self, old: Tensor, new: Tensor, update: bool) -> tuple[Tensor, Tensor, Tensor]:
        size = len(old)
        counts = torch.empty(-(-size // BLOCK), dtype=torch.int16)
        offsets = torch.empty(size, dtype=torch.uint8)  # room for all; what stays unused is never touched
        values = torch.empty(size, dtype=torch.int16)
        found = self._library.swe_rl_delta_compare(
            old.data_ptr(),
            new.data_ptr(),
            size,
            int(update),
            counts.data_ptr(),
            offsets.data_ptr(),
            values.data_ptr(),
        )
        return counts, offsets[:found].clone(), values[:found].clone()

    def apply(self, target: Tensor, counts: Tensor, offsets: Tensor, values: Tensor) -> bool:
        done = self._library.swe_rl_delta_apply(
            target.data_ptr(),
            len(target),
            counts.data_ptr(),
            offsets.data_ptr(),
            values.data_ptr(),
            len(values),
        )
        return bool(done == 0)

    def checksum(self, values: Tensor, first: int) -> int:
        return int(self._library.swe_rl_delta_checksum(values.data_ptr(), len(values), first))


def fits(size: int, counts: Tensor, ends: Tensor, offsets: Tensor) -> bool:
    """Whether counts, their sums and offsets describe a delta of `size` elements. Waits for the device."""
    last = size - (len(counts) - 1) * BLOCK  # elements of the last block
    tail = offsets[int(ends[-1] - counts[-1]) :] if len(counts) else offsets
    # int16: torch compares in the dtype of the tensor, where a whole block of 256 would be 0
    within = (tail.to(torch.int16) < last).all()
    return bool(((counts >= 0) & (counts <= BLOCK)).all() & (counts.sum() == len(offsets)) & within)


class CudaDelta:
    def __init__(self, path: Path) -> None:
        self._library: Any = ctypes.CDLL(str(path))
        arguments: dict[str, list[Any]] = {
            "count": [POINTER, POINTER, NUMBER, POINTER],
            "fill": [POINTER, POINTER, NUMBER, ctypes.c_int, POINTER, POINTER, POINTER, POINTER],
            "apply": [POINTER, NUMBER, POINTER, POINTER, POINTER, POINTER],
            "checksum": [POINTER, NUMBER, NUMBER, POINTER],
        }
        for name, types in arguments.items():
            getattr(self._library, f"swe_rl_delta_cuda_{name}").argtypes = [*types, POINTER]

    def compare(self, old: Tensor, new: Tensor, update: bool) -> tuple[Tensor, Tensor, Tensor]:
        counts = old.new_empty(-(-len(old) // BLOCK))
        self._call("count", old, new, len(old), counts)
        ends = counts.long().cumsum(0)
        found = int(ends[-1]) if len(ends) else 0  # the host waits here: the sizes of the parts are needed
        offsets, values = old.new_empty(found, dtype=torch.uint8), old.new_empty(found)
        if found:
            self._call("fill", old, new, len(old), int(update), counts, ends, offsets, values)
        return counts, offsets, values

    def apply(self, target: Tensor, counts: Tensor, offsets: Tensor, values: Tensor) -> bool:
        ends = counts.long().cumsum(0)
        if not fits(len(target), counts, ends, offsets):
            return False
        self._call("apply", target, len(target), counts, ends, offsets, values)
        return True

    def checksum(self, values: Tensor, first: int) -> int:
        total = torch.zeros(1, dtype=torch.int64, device=values.device)
        self._call("checksum", values, len(values), first, total)
        return int(total)

    def _call(self, name: str, tensor: Tensor, *rest: Tensor | int) -> None:
        """Queues one function on the current stream of the device that `tensor`, its first argument, is on."""
        with torch.cuda.device(tensor.device):
            stream = torch.cuda.current_stream().cuda_stream
            values = [item.data_ptr() if isinstance(item, Tensor) else item for item in (tensor, *rest)]
            code = getattr(self._library, f"swe_rl_delta_cuda_{name}")(*values, stream)
        if code:
            raise RuntimeError(f"weight_delta {name}: CUDA error {code}")
