"""Measures sandboxes on this machine: time to ready, of the first and of later commands, of closing; and throughput."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from swe_rl.sandbox import SandboxPool, open_sandbox
from swe_rl.types import SandboxSpec

_COMMANDS = 20  # per sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxBench:
    """Milliseconds, and sandboxes per second."""

    ready_ms_p50: float
    ready_ms_p95: float
    first_use_ms_p50: float  # ready and the first command together
    command_ms_p50: float
    command_ms_p95: float
    close_ms_p50: float
    per_second: float  # opened, used once and closed, `concurrency` at a time

    def rows(self) -> list[tuple[str, float, str]]:
        """(name, value, unit) in the order of reading."""
        return [(name, getattr(self, name), "1/s" if name == "per_second" else "ms") for name in self.__slots__]


async def measure(spec: SandboxSpec | None = None, *, num: int = 50, concurrency: int = 16) -> SandboxBench:
    """Opens `num` sandboxes one after another over a layer of 60 files, then `num` at `concurrency`. `spec` says of
    which kind, local ones by default."""
    with tempfile.TemporaryDirectory() as layer:
        for i in range(60):
            Path(layer, f"module_{i}.py").write_text(f"VALUE = {i}\n" * 20)
        spec = replace(spec or SandboxSpec(), layers=(layer,))
        await _one(spec)  # the binary, the page cache
        samples = [await _one(spec) for _ in range(num)]
        per_second = await _throughput(spec, num, concurrency)
    ready, first, commands, close = zip(*samples, strict=True)
    flat = [value for row in commands for value in row]
    return SandboxBench(
        ready_ms_p50=statistics.median(ready),
        ready_ms_p95=_p95(list(ready)),
        first_use_ms_p50=statistics.median(first),
        command_ms_p50=statistics.median(flat),
        command_ms_p95=_p95(flat),
        close_ms_p50=statistics.median(close),
        per_second=per_second,
    )


async def _one(spec: SandboxSpec) -> tuple[float, float, list[float], float]:
    start = time.perf_counter()
    async with open_sandbox(spec) as sandbox:
        ready = time.perf_counter()
        await sandbox.exec("true")
        first = before = time.perf_counter()
        commands = []
        for _ in range(_COMMANDS):
            await sandbox.exec("true")
            commands.append((time.perf_counter() - before) * 1e3)
            before = time.perf_counter()
    return (ready - start) * 1e3, (first - start) * 1e3, commands, (time.perf_counter() - before) * 1e3


async def _throughput(spec: SandboxSpec, num: int, concurrency: int) -> float:
    pool = SandboxPool(concurrency)

    async def use() -> None:
        async with pool.lease(spec) as sandbox:
            await sandbox.exec("true")

    start = time.perf_counter()
    await asyncio.gather(*(use() for _ in range(num)))
    return num / (time.perf_counter() - start)


def _p95(values: list[float]) -> float:
    return sorted(values)[min(int(len(values) * 0.95), len(values) - 1)]
