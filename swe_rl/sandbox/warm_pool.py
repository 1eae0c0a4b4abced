"""Sandboxes that are ready before anybody asks for them, in the order in which they will be asked for.

Whoever knows what comes next says so (`expect`); the pool starts sandboxes for the head of that list while there is
room for them. A sandbox is handed out once and never comes back. What nobody asked for in time is closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass

from swe_rl.errors import SweRlError
from swe_rl.protocols import Sandbox
from swe_rl.types import SandboxSpec

log = logging.getLogger(__name__)

MAX_AGE_S = 300.0  # a warm sandbox's lease is longer by this, so that it is whole when somebody takes it


def spec_digest(spec: SandboxSpec) -> str:
    """Name of an environment: equal for specs that make the same sandbox, on any node."""
    text = json.dumps(asdict(spec), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(slots=True)
class _Warm:
    spec: SandboxSpec
    sandbox: Sandbox
    since: float


class WarmPool:
    """At most `limit` sandboxes that wait. `start` gives None when there is no room for one now."""

    def __init__(
        self,
        start: Callable[[SandboxSpec], Awaitable[Sandbox | None]],
        stop: Callable[[SandboxSpec, Sandbox], Awaitable[None]],
        *,
        limit: int,
    ) -> None:
        self._start, self._stop, self._limit = start, stop, limit
        self._wanted: deque[tuple[str, SandboxSpec]] = deque()
        self._ready: dict[str, deque[_Warm]] = {}
        self._filling: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._ready.values()))

    def expect(self, specs: Iterable[SandboxSpec]) -> None:
        """What will be asked for, in order, one entry per sandbox; replaces what was expected before."""
        if not self._limit or self._closed:
            return
        ready = Counter({digest: len(items) for digest, items in self._ready.items()})
        self._wanted.clear()
        for spec in specs:
            digest = spec_digest(spec)
            if ready[digest] > 0:
                ready[digest] -= 1  # one of those that wait already is for it
            else:
                self._wanted.append((digest, spec))
        self.fill()

    def fill(self) -> None:
        """Starts sandboxes in the background as far as they are wanted and fit."""
        if self._wanted and not self._closed and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._fill(), name="warm-pool")

    def take(self, spec: SandboxSpec) -> Sandbox | None:
        """A ready one for `spec`, now the caller's; None when there is none."""
        if not self._limit:
            return None
        digest = spec_digest(spec)
        items = self._ready.get(digest)
        if not items:  # it is started on the spot, so nobody needs to do it ahead
            for index, (wanted, _) in enumerate(self._wanted):
                if wanted == digest:
                    del self._wanted[index]
                    break
            return None
        found = items.popleft()
        if not items:
            del self._ready[digest]
        return found.sandbox

    async def evict(self) -> bool:
        """Closes the oldest that waits, for somebody who needs its room more; False when none waits."""
        oldest = min((items[0] for items in self._ready.values()), key=lambda warm: warm.since, default=None)
        if oldest is None:
            return False
        await self._drop(oldest)
        return True

    async def drop_old(self, *, now: float | None = None) -> int:
        """Closes what nobody took in `MAX_AGE_S`; returns how many."""
        limit = (time.monotonic() if now is None else now) - MAX_AGE_S
        old = [warm for items in self._ready.values() for warm in items if warm.since <= limit]
        for warm in old:
            await self._drop(warm)
        return len(old)

    async def close(self) -> None:
        """Ends the filling and closes what waits. Idempotent."""
        self._closed = True
        self._wanted.clear()
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        while await self.evict():
            pass

    async def _fill(self) -> None:
        while self._wanted and len(self) < self._limit:
            digest, spec = self._wanted[0]
            try:
                sandbox = await self._start(spec)
            except SweRlError as err:  # who really needs it will meet the same, and say so
                log.warning("no sandbox could be started ahead: %s", err)
                self._wanted.clear()
                return
            if sandbox is None:
                return
            if self._wanted and self._wanted[0][0] == digest:
                self._wanted.popleft()
            self._ready.setdefault(digest, deque()).append(_Warm(spec, sandbox, time.monotonic()))

    async def _drop(self, warm: _Warm) -> None:
        digest = spec_digest(warm.spec)
        self._ready[digest].remove(warm)
        if not self._ready[digest]:
            del self._ready[digest]
        await self._stop(warm.spec, warm.sandbox)
