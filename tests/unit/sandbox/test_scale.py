"""Many sandboxes at once, and many one after another: all answer, nothing grows."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from real_parts import require

from swe_rl.errors import SandboxUnavailable
from swe_rl.sandbox import SandboxPool, cgroup, open_sandbox
from swe_rl.sandbox.owner import owner_label
from swe_rl.types import Limits, SandboxSpec

OPEN = 512
CYCLES = 1000
MAX_MIB = 4096
MAX_SUPERVISOR_KIB = 2048


async def _need_sandboxes() -> None:
    try:
        async with open_sandbox(SandboxSpec()):
            pass
    except SandboxUnavailable as err:
        require(False, f"a machine that allows sandboxes ({err})")


def own_processes() -> list[Path]:
    """Launchers and supervisors of this process."""
    mark = b"swe-sandboxd\0owner=" + owner_label().encode()
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and (path / "cmdline").read_bytes().startswith(mark):
                found.append(path)
        except OSError:
            continue
    return found


def kib(path: Path, file: str, key: str) -> int:
    lines = (path / file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def traces() -> tuple[int, int, int, int]:
    """(mounts that this process sees of sandboxes, its descriptors, its processes, its control groups)."""
    mounts = sum("swe-" in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
    parent = cgroup.parent()
    groups = len(list(Path(parent[0]).glob(f"{cgroup.PREFIX}{owner_label()}-*"))) if parent else 0
    return mounts, len(os.listdir("/proc/self/fd")), len(own_processes()), groups


@pytest.mark.slow
async def test_512_at_once_within_four_gigabytes_each_answering() -> None:
    await _need_sandboxes()
    pool = SandboxPool(OPEN, memory_bytes=1 << 40)
    spec = SandboxSpec(limits=Limits(pids=16))  # so many have to fit into the machine's process ids

    async def ask(number: int, sandbox: object) -> bytes:
        await sandbox.write_file("number", str(number).encode())  # type: ignore[attr-defined]
        return (await sandbox.exec("cat number")).stdout  # type: ignore[attr-defined]

    async with AsyncExitStack() as stack:
        leases = [stack.enter_async_context(pool.lease(spec)) for _ in range(OPEN)]
        sandboxes = await asyncio.gather(*leases)
        answers = await asyncio.gather(*(ask(*item) for item in enumerate(sandboxes)))
        assert answers == [str(number).encode() for number in range(OPEN)]
        processes = own_processes()
        assert len(processes) == 2 * OPEN
        assert max(kib(path, "status", "VmRSS:") for path in processes) <= MAX_SUPERVISOR_KIB
        resident = sum(kib(path, "smaps_rollup", "Pss:") for path in processes) + kib(
            Path("/proc/self"), "status", "VmRSS:"
        )
        assert resident < MAX_MIB << 10
    assert own_processes() == []


@pytest.mark.slow
async def test_a_thousand_cycles_leave_nothing_and_fail_never() -> None:
    await _need_sandboxes()
    pool = SandboxPool(16)

    async def cycle(number: int) -> None:
        async with pool.lease(SandboxSpec()) as sandbox:
            result = await sandbox.exec(f"echo $(({number} * 2)) > x; cat x; (sleep 1000 &)")
            assert result.stdout == b"%d\n" % (number * 2)

    await asyncio.gather(*(cycle(number) for number in range(32)))
    before = traces()
    await asyncio.gather(*(cycle(number) for number in range(CYCLES)))
    assert traces() == before
    assert pool.counts["lost"] == pool.counts["start_failures"] == 0
    assert pool.counts["started"] == pool.counts["ended"] == 32 + CYCLES
