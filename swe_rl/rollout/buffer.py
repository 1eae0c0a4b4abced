"""Groups on their way from the rollout producer to the trainer. Synchronous training is max_staleness = 0.

A policy step goes through four states:

    WAITING   `admit(step)` blocks: the trainer is more than `max_staleness` steps behind
    RUNNING   its rollouts are being sampled
    READY     a group of it lies in the queue (`put` blocks while `capacity` groups do)
    CONSUMED  the trainer took the group

Invariants:
- Steps are admitted in order, and step s only when `version >= s - max_staleness`; `version` counts finished optimiser
  steps whose weights were published, and grows only by `advance`. So when the trainer takes groups of step s at version
  s, they were sampled with weights at most `max_staleness` steps older.
- Groups of a step leave in the order in which they were put; the buffer loses and repeats none.
- A producer that fails makes every later read raise its exception, after the groups that were ready. Nothing hangs.
- `aclose` (or leaving the context) cancels the producer and waits until it is gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self

from swe_rl.errors import InvariantError
from swe_rl.types import TrajectoryGroup


class RolloutBuffer:
    """Usage: `async with RolloutBuffer(...) as buffer: buffer.start(produce); async for group in buffer: ...;
    buffer.advance(v)`."""

    def __init__(self, *, max_staleness: int, capacity: int, version: int = 0) -> None:
        """`capacity` is in groups; `version` is the number of optimiser steps done before (resume)."""
        if max_staleness < 0 or capacity < 1:
            raise ValueError(f"max_staleness={max_staleness} must be >= 0 and capacity={capacity} >= 1")
        self.max_staleness = max_staleness
        self.capacity = capacity
        self.version = version
        self._ready: deque[TrajectoryGroup] = deque()
        self._changed = asyncio.Condition()
        self._finished = False
        self._failure: BaseException | None = None
        self._producer: asyncio.Task[None] | None = None

    def start(self, produce: Callable[[RolloutBuffer], Awaitable[None]]) -> None:
        """Runs the producer as a task. It calls `admit` and `put`; its return ends the iteration."""
        if self._producer is not None:
            raise InvariantError("the buffer has a producer already")
        self._producer = asyncio.create_task(self._run(produce), name="rollout-producer")

    async def admit(self, step: int) -> None:
        """Producer: waits until rollouts of `step` may start."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= step - self.max_staleness)

    async def put(self, group: TrajectoryGroup) -> None:
        """Producer: hands over one group; waits while the buffer is full."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._ready) < self.capacity)
            self._ready.append(group)
            self._changed.notify_all()

    async def advance(self, version: int) -> None:
        """Trainer: `version` optimiser steps are done and their weights are published."""
        async with self._changed:
            if version < self.version:
                raise InvariantError(f"the version went back from {self.version} to {version}")
            self.version = version
            self._changed.notify_all()

    async def take(self, count: int) -> list[TrajectoryGroup]:
        """Trainer: the next `count` groups; fewer only when the producer has ended. Raises what the producer raised."""
        groups: list[TrajectoryGroup] = []
        while len(groups) < count:
            try:
                groups.append(await anext(self))
            except StopAsyncIteration:
                break
        return groups

    def __aiter__(self) -> AsyncIterator[TrajectoryGroup]:
        return self

    async def __anext__(self) -> TrajectoryGroup:
        async with self._changed:
            await self._changed.wait_for(lambda: self._ready or self._finished)
            if self._ready:
                group = self._ready.popleft()
                self._changed.notify_all()
                return group
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stops the producer and waits for it; its cancellation closes sandboxes and releases sessions. Idempotent."""
        if self._producer is not None and not self._producer.done():
            self._producer.cancel()
            await asyncio.wait([self._producer])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self, produce: Callable[[RolloutBuffer], Awaitable[None]]) -> None:
        try:
            await produce(self)
        except Exception as err:  # kept, and raised where the groups are read
            self._failure = err
        finally:
            self._finished = True
            async with self._changed:
                self._changed.notify_all()
