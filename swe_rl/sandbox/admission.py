"""Who may have a sandbox now: buckets of a node that never run over, served in the order of asking.

A lane is one set of buckets. A node has two, so that agents who wait for the model never keep grading from running and
grading never keeps agents from starting: `agents` and `grading`, each with its own share of the node. CPU is lent many
times over to agents, who wait for the model most of the time; memory is never lent twice. Files that a local sandbox
writes are in memory and count as such.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swe_rl.types import SandboxSpec

AGENTS, GRADING = "agents", "grading"
AGENT_CPUS = 1 / 256  # of a core per sandbox: an agent runs commands a few per cent of its time
GRADING_CPUS = 1 / 2  # hidden tests compute, with pauses for starts and files
Amounts = Mapping[str, float]  # of "places", "cpus", "memory_bytes", "pids", "disk_bytes"


@dataclass(slots=True)
class _Waiter:
    demand: Amounts
    granted: asyncio.Future[None]


@dataclass(slots=True)
class Lane:
    """Buckets with a first-in, first-out queue before them. What no bucket is named for is not limited.

    An empty lane admits anything: a sandbox that is larger than the share of its lane runs alone.
    """

    capacity: Amounts
    waited_s: Counter[str] = field(default_factory=Counter)  # by the bucket that was short
    _used: Counter[str] = field(default_factory=Counter)
    _holders: int = 0
    _queue: deque[_Waiter] = field(default_factory=deque)

    def short_of(self, demand: Amounts) -> str | None:
        """The first bucket that cannot give what is asked for now; None when all can."""
        if not self._holders:
            return None
        for name, amount in demand.items():
            if name in self.capacity and self._used[name] + amount > self.capacity[name] * (1 + 1e-9):
                return name
        return None

    def try_acquire(self, demand: Amounts) -> bool:
        """Takes it if nobody waits and there is room; never waits."""
        if self._queue or self.short_of(demand):
            return False
        self.charge(demand)
        return True

    async def acquire(self, demand: Amounts) -> None:
        """Waits for its turn and for room. Whoever acquires releases, once."""
        if self.try_acquire(demand):
            return
        short, started = self.short_of(demand) or "queue", time.monotonic()
        waiter = _Waiter(demand, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.release(demand)
            else:
                self._queue.remove(waiter)
                self._serve()  # it may have been the one that the others waited behind
            raise
        finally:
            self.waited_s[short] += time.monotonic() - started  # type: ignore[assignment]  # a Counter adds floats too

    def charge(self, demand: Amounts) -> None:
        """Takes it in any case: later ones wait until it is paid back. For forks, whose owner cannot wait."""
        self._used.update(demand)
        self._holders += 1

    def release(self, demand: Amounts) -> None:
        """Gives back what was acquired or charged, and admits whoever can go now."""
        self._used.subtract(demand)
        self._holders -= 1
        self._serve()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def holders(self) -> int:
        return self._holders

    def _serve(self) -> None:
        while self._queue and not self.short_of(self._queue[0].demand):
            waiter = self._queue.popleft()
            if not waiter.granted.cancelled():
                self.charge(waiter.demand)
                waiter.granted.set_result(None)


def node_capacity(*, memory_bytes: int = 0) -> dict[str, float]:
    """What this machine can give to sandboxes: cores, memory (`memory_bytes` when given), half of its process ids, nine
    tenths of the free disk below the temporary directory."""
    return {
        "cpus": float(len(os.sched_getaffinity(0))),
        "memory_bytes": float(memory_bytes or _total_memory()),
        "pids": _first_number("/proc/sys/kernel/pid_max", 32768) / 2,
        "disk_bytes": os.statvfs(tempfile.gettempdir()).f_bavail * os.statvfs(tempfile.gettempdir()).f_frsize * 0.9,
    }


def split_lanes(capacity: Amounts, *, agents: int, grading: int) -> dict[str, Lane]:
    """The two lanes of a node with so many places each. Memory, process ids and disk are shared out in proportion to
    them; the cores are each lane's in full, since agents leave them idle."""
    shares = {AGENTS: agents / (agents + grading), GRADING: grading / (agents + grading)}
    places = {AGENTS: agents, GRADING: grading}
    lanes = {}
    for name, share in shares.items():
        room = {key: value * (1.0 if key == "cpus" else share) for key, value in capacity.items()}
        lanes[name] = Lane({"places": float(places[name]), **room})
    return lanes


def place_demand(lane: str) -> dict[str, float]:
    """What a sandbox takes while somebody uses it."""
    return {"places": 1.0, "cpus": GRADING_CPUS if lane == GRADING else AGENT_CPUS}


def room_demand(spec: SandboxSpec) -> dict[str, float]:
    """What a sandbox takes from its start to its end."""
    limits = spec.limits
    in_memory = spec.backend == "local" and spec.isolation != "none"
    return {
        "memory_bytes": float(limits.memory_bytes + (limits.disk_bytes if in_memory else 0)),
        "pids": float(limits.pids),
        "disk_bytes": float(0 if in_memory else limits.disk_bytes),
    }


def _total_memory() -> int:
    """Of the machine, or of the control group that this process is in where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    return min(physical, *(_first_number(path, physical) for path in groups))


def _first_number(path: str, default: int) -> int:
    try:
        word = Path(path).read_text().split()[0]
    except (OSError, IndexError):
        return default
    return int(word) if word.isdigit() and int(word) > 0 else default
