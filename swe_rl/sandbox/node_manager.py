"""The manager of a node's sandboxes: it admits, starts, hands out, ends, and cleans up after the dead.

One per node, a plain asyncio object: in this process, or inside the one Ray actor of each node (rollout/ray_node.py).
It owns every sandbox that it started; none is ever used twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Self

from swe_rl.errors import ConfigError, SandboxError, SandboxUnavailable
from swe_rl.protocols import Sandbox
from swe_rl.sandbox.admission import AGENTS, Amounts, node_capacity, place_demand, room_demand, split_lanes
from swe_rl.sandbox.backends import start_sandbox
from swe_rl.sandbox.client import SandboxClient
from swe_rl.sandbox.descriptors import allow_descriptors
from swe_rl.sandbox.leased import LeasedSandbox
from swe_rl.sandbox.owner import OwnerLease
from swe_rl.sandbox.reap import reap
from swe_rl.sandbox.stats import observe
from swe_rl.sandbox.warm_pool import MAX_AGE_S, WarmPool
from swe_rl.types import SandboxSpec

log = logging.getLogger(__name__)

UPKEEP_S = 30.0  # between two looks for leftovers of dead owners and for warm sandboxes that nobody wants
LOCAL_STARTS = 32  # at a time; each needs the machine for milliseconds
RETRY_PAUSE_S = 0.2  # before the second try to start one, doubled each time, times 0.5 to 1.5


class SandboxPool:
    """Leases of sandboxes on this node.

    Used as an async context manager it also keeps the node clean: it beats for its sandboxes, and removes what dead
    owners left at the start, every UPKEEP_S and at the end. Without that it only admits.
    """

    def __init__(
        self,
        max_concurrency: int,
        *,
        grading: int = 0,
        memory_bytes: int = 0,
        warm: int = 0,
        daemon_calls: int = 6,
        retries: int = 2,
        run_id: str = "",
        start: Callable[[SandboxSpec], Awaitable[Sandbox]] = start_sandbox,
    ) -> None:
        """max_concurrency, grading: places of the two lanes (grading 0: two per core). memory_bytes: that sandboxes
        may take together, 0 for all of the machine's. warm: started ahead at most. daemon_calls: starts and ends in
        flight at a container daemon. retries: further tries to start one. Raises ConfigError for a bad value."""
        if max_concurrency < 1:
            raise ConfigError(f"sandbox.concurrency={max_concurrency} must be at least 1")
        capacity = node_capacity(memory_bytes=memory_bytes)
        grading = grading or max(1, int(capacity["cpus"] * 2))
        allow_descriptors(max_concurrency + grading + warm)
        self.max_concurrency = max_concurrency
        self.lanes = split_lanes(capacity, agents=max_concurrency, grading=grading)
        self.counts: Counter[str] = Counter()
        self._warm = WarmPool(self._start_ahead, self._end_unused, limit=warm)
        self._calls = asyncio.Semaphore(daemon_calls)
        self._local_calls = asyncio.Semaphore(LOCAL_STARTS)
        self._retries, self._run_id, self._start_one = retries, run_id, start
        self._charged: dict[LeasedSandbox, tuple[str, tuple[Amounts, ...]]] = {}  # by what is open: lane and demands
        self._owner: OwnerLease | None = None
        self._upkeep: asyncio.Task[None] | None = None

    # ---- leases ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec, *, lane: str = AGENTS) -> AsyncIterator[Sandbox]:
        """Waits for its turn in `lane`, then behaves as `open_sandbox`; a warm sandbox is there at once."""
        sandbox = await self._open(spec, lane)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def expect(self, specs: Iterable[SandboxSpec]) -> None:
        """Which sandboxes of the lane `agents` will be asked for next, in order: they are started ahead, as far as
        there is room and `warm` allows."""
        self._warm.expect(specs)

    @property
    def num_open(self) -> int:
        """Sandboxes that are handed out now, forks included."""
        return len(self._charged)

    @property
    def num_warm(self) -> int:
        return len(self._warm)

    def snapshot(self) -> Counter[str]:
        """All counters since the pool was made, the seconds waited for each bucket included."""
        waits = {
            f"wait_{name}_{bucket}_s": seconds
            for name, lane in self.lanes.items()
            for bucket, seconds in lane.waited_s.items()
        }
        return self.counts + Counter(waits)

    # ---- life -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._owner = OwnerLease.acquire(self._run_id)
        await self._reap()
        self._upkeep = asyncio.create_task(self._keep_up(), name="sandbox-upkeep")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what is warm or still open, and the upkeep. Idempotent."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            with suppress(asyncio.CancelledError):
                await self._upkeep
            self._upkeep = None
        await self._warm.close()
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._charged)), return_exceptions=True)
        if self._owner is not None:
            await self._reap()
            self._owner.release()
            self._owner = None

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_S)
            try:
                await self._reap()
                self.counts["warm_unused"] += await self._warm.drop_old()
            except (SandboxError, OSError) as err:  # the next look sees to it
                log.warning("upkeep of sandboxes: %s", err)
            self._warm.fill()

    async def _reap(self) -> None:
        found = await asyncio.to_thread(reap)
        self.counts["reaped"] += found.total
        if found.total:
            log.warning("removed what dead owners left: %s", found)

    # ---- opening and closing --------------------------------------------------------------------------------

    async def _open(self, spec: SandboxSpec, lane: str) -> LeasedSandbox:
        asked, buckets = time.monotonic(), self.lanes[lane]
        place, room = place_demand(lane), room_demand(spec)
        warm = self._warm.take(spec) if lane == AGENTS else None
        if warm is not None:
            try:
                await buckets.acquire(place)
            except BaseException:
                await asyncio.shield(self._end_unused(spec, warm))
                raise
            leased = self._hand_out(warm, spec, lane, (place, room))
        else:
            both = {**place, **room}
            while buckets.short_of(both) and await self._warm.evict():
                self.counts["warm_evicted"] += 1
            await buckets.acquire(both)
            observe(self.counts, f"wait_{lane}", time.monotonic() - asked)
            try:
                leased = self._hand_out(await self._start(spec), spec, lane, (both,))
            except BaseException:
                buckets.release(both)
                raise
        self.counts["leases"] += 1
        self.counts["warm_leases"] += warm is not None
        observe(self.counts, f"{spec.backend}_lease", time.monotonic() - asked)
        self._warm.fill()
        return leased

    async def _start(self, spec: SandboxSpec) -> Sandbox:
        """Retried with jitter after trouble of the machine; what no retry can cure passes through."""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(random.uniform(0.5, 1.5) * RETRY_PAUSE_S * 2 ** (attempt - 1))
            start = time.monotonic()
            try:
                async with self._calls_of(spec):
                    sandbox = await self._start_one(spec)
            except SandboxUnavailable:
                raise
            except SandboxError:
                self.counts["start_failures"] += 1
                if attempt == self._retries:
                    raise
            else:
                self.counts["started"] += 1
                observe(self.counts, f"{spec.backend}_start", time.monotonic() - start)
                return sandbox
        raise AssertionError("unreachable: the last try returns or raises")

    async def _start_ahead(self, spec: SandboxSpec) -> Sandbox | None:
        room, buckets = room_demand(spec), self.lanes[AGENTS]
        if not buckets.try_acquire(room):
            return None
        longer = replace(spec, limits=replace(spec.limits, lease_s=spec.limits.lease_s + MAX_AGE_S))
        try:
            return await self._start(longer)
        except BaseException:
            buckets.release(room)
            raise

    async def _end_unused(self, spec: SandboxSpec, sandbox: Sandbox) -> None:
        try:
            await self._end(spec, sandbox)
        finally:
            self.lanes[AGENTS].release(room_demand(spec))

    async def _end(self, spec: SandboxSpec, sandbox: Sandbox) -> None:
        start = time.monotonic()
        async with self._calls_of(spec):
            await sandbox.close()
        if isinstance(sandbox, SandboxClient):
            self.counts.update(sandbox.counts)
        self.counts["ended"] += 1
        observe(self.counts, f"{spec.backend}_end", time.monotonic() - start)

    def _calls_of(self, spec: SandboxSpec) -> asyncio.Semaphore:
        return self._local_calls if spec.backend == "local" else self._calls

    def _hand_out(self, inner: Sandbox, spec: SandboxSpec, lane: str, demands: tuple[Amounts, ...]) -> LeasedSandbox:
        def adopt(fork: Sandbox, of: SandboxSpec) -> LeasedSandbox:
            room = room_demand(of)
            self.lanes[lane].charge(room)
            self.counts["forks"] += 1
            return self._hand_out(fork, of, lane, (room,))

        leased = LeasedSandbox(inner, spec, counts=self.counts, give_back=self._give_back, adopt=adopt)
        self._charged[leased] = (lane, demands)
        return leased

    async def _give_back(self, leased: LeasedSandbox) -> None:
        lane, demands = self._charged[leased]
        try:
            await self._end(leased.spec, leased.inner)
        finally:
            del self._charged[leased]
            for demand in demands:
                self.lanes[lane].release(demand)
            self._warm.fill()
