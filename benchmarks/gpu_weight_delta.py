"""Weight deltas on one GPU: agreement with torch bit by bit, and speed. A section of gpu_suite."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swe_rl.ops import weight_delta, weight_delta_native

if TYPE_CHECKING:
    from gpu_suite import Suite

ELEMENTS = 1 << 29  # 1 GiB of bf16
SHARE = 0.05
REPEATS = 10
# Compare reads two tensors twice, checksum one tensor, apply 3 bytes an entry, to scattered places: the time at half of
# 3 TB/s, and the host waits for a size and a verdict.
LIMITS_MS = {"compare": 3.0, "apply": 2.0, "checksum": 1.0}


def weight_delta_section(suite: Suite) -> None:
    """The compiled code is built first where nvcc is found."""
    suite.measure("built", "missing", _build, limit=0)
    suite.measure("differences from torch", "tensors", _differences, limit=0)
    for operation, limit in LIMITS_MS.items():
        detail = f"{ELEMENTS} elements, {SHARE:.0%} changed"
        suite.measure(
            f"{operation} time", "ms", functools.partial(_milliseconds, operation), limit=limit, detail=detail
        )


def _build() -> float:
    if weight_delta_native.library_path("cuda") is None and shutil.which("nvcc"):
        script = Path(__file__).resolve().parent.parent / "csrc" / "ops" / "build.sh"
        environment = {**os.environ, "SWE_RL_CUDA": "1"}
        subprocess.run(["sh", str(script), str(weight_delta_native.LIBRARIES)], env=environment, check=True)
    return float(weight_delta_native.library_path("cuda") is None)


def _versions(elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    old = torch.empty(elements, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    changed = torch.empty(elements, dtype=torch.bfloat16, device="cuda").uniform_(generator=generator) < SHARE
    return old, torch.where(changed, -old, old)


def _differences() -> float:
    different = 0
    for elements in (1, 255, 1024, 4099, (1 << 24) + 7):
        old, new = _versions(elements)
        mine, theirs = (weight_delta.compare(old, new, impl=impl) for impl in ("cuda", "reference"))
        different += sum(not torch.equal(getattr(mine, n), getattr(theirs, n)) for n in ("counts", "offsets", "values"))
        different += weight_delta.checksum(new, impl="cuda") != weight_delta.checksum(new, impl="reference")
        weight_delta.apply(old, mine, impl="cuda")
        different += not torch.equal(old, new)
    return float(different)


def _milliseconds(operation: str) -> float:
    """Median of REPEATS."""
    old, new = _versions(ELEMENTS)
    delta = weight_delta.compare(old, new, impl="cuda")
    calls: dict[str, Callable[[], object]] = {
        "compare": lambda: weight_delta.compare(old, new, impl="cuda"),
        "apply": lambda: weight_delta.apply(old, delta, impl="cuda"),
        "checksum": lambda: weight_delta.checksum(new, impl="cuda"),
    }
    times = []
    for _ in range(REPEATS + 1):  # the first one also loads the kernels
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[operation]()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[1:])[REPEATS // 2]
