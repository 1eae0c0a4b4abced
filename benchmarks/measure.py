"""Time and memory of a step, on a CPU or a CUDA device. Times are seconds, memory is MiB."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

MIB = 1 << 20


@dataclass
class Times:
    """One entry per repetition. cpu is the time of all threads of this process: a busy machine disturbs it less."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """Of wall, between neighbours."""
        ordered = sorted(self.wall)
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    def median_ratio_to(self, other: Times, *, cpu: bool = False) -> float:
        """Median over repetitions of this time / the other's of the same repetition."""
        pairs = zip(self.cpu, other.cpu, strict=True) if cpu else zip(self.wall, other.wall, strict=True)
        return statistics.median(mine / its for mine, its in pairs)


def interleaved(steps: dict[str, Callable[[], object]], repeats: int, *, device: str) -> dict[str, Times]:
    """Runs all steps `repeats` times, one after the other, each round starting with another one."""
    times = {name: Times() for name in steps}
    names = list(steps)
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            wall, cpu = timed(steps[name], device=device)
            times[name].wall.append(wall)
            times[name].cpu.append(cpu)
    return times


def timed(step: Callable[[], object], *, device: str) -> tuple[float, float]:
    """(wall, cpu) seconds of one call; on CUDA between two events of the current stream."""
    cpu = time.process_time()
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000, time.process_time() - cpu
    wall = time.perf_counter()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def peak_memory(step: Callable[[], object], *, device: str, clear: Callable[[], None]) -> float:
    """Highest memory during a second call of `step`, over what was there before it; `clear` drops its results.

    The first call is not measured: it also loads libraries and compiles. On a CPU this is resident memory, so run it
    in a process of its own.
    """
    step()
    clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - base) / MIB
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later would hide in the base
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    base_kib = _status_kib("VmRSS")
    step()
    return (_status_kib("VmHWM") - base_kib) / 1024


def _status_kib(field_name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field_name + ":"))
