"""The buffer: synchronous at zero staleness, bounded, loses nothing, and never hangs on a crash."""

from __future__ import annotations

import asyncio

import pytest

from swe_rl.errors import InvariantError
from swe_rl.rollout import RolloutBuffer
from swe_rl.types import TrajectoryGroup

PER_STEP = 3


def group(step: int, number: int) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=f"{step}/{number}", task_id="t", trajectories=[])


class Producer:
    """Puts PER_STEP groups per step and notes the trainer's version at which each step began."""

    def __init__(self, steps: int, *, first: int = 0, crash_at: int | None = None) -> None:
        self.steps, self.first, self.crash_at = steps, first, crash_at
        self.versions: dict[int, int] = {}
        self.cancelled = False
        self.most_ready = 0

    async def __call__(self, buffer: RolloutBuffer) -> None:
        try:
            for step in range(self.first, self.steps):
                await buffer.admit(step)
                self.versions[step] = buffer.version
                for number in range(PER_STEP):
                    if step == self.crash_at and number == 1:
                        raise RuntimeError("engine gone")
                    await buffer.put(group(step, number))
        except asyncio.CancelledError:
            self.cancelled = True
            raise


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("first", [0, 2])
async def test_every_group_once_in_order_and_never_too_stale(staleness: int, first: int) -> None:
    producer = Producer(6, first=first)
    seen: list[str] = []
    async with RolloutBuffer(max_staleness=staleness, capacity=PER_STEP * (1 + staleness), version=first) as buffer:
        buffer.start(producer)
        for step in range(first, 6):
            for _ in range(20):
                await asyncio.sleep(0)  # lets the producer run as far ahead as it may
            assert max(producer.versions) <= buffer.version + staleness
            seen += [item.group_id for item in await buffer.take(PER_STEP)]
            assert buffer.version - producer.versions[step] <= staleness
            await buffer.advance(step + 1)
        assert await buffer.take(1) == []
    assert seen == [f"{step}/{number}" for step in range(first, 6) for number in range(PER_STEP)]
    if staleness:
        assert any(version < step for step, version in producer.versions.items())
    else:
        assert all(version == step for step, version in producer.versions.items())


async def test_iteration() -> None:
    async with RolloutBuffer(max_staleness=9, capacity=2) as buffer:
        buffer.start(Producer(2))
        assert [item.group_id async for item in buffer] == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]


async def test_capacity_holds_the_producer() -> None:
    producer = Producer(9)
    async with RolloutBuffer(max_staleness=99, capacity=4) as buffer:
        buffer.start(producer)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(buffer._ready) == 4
        assert max(producer.versions) == 1
    assert producer.cancelled


async def test_a_crash_reaches_the_reader_after_what_was_ready() -> None:
    async with RolloutBuffer(max_staleness=9, capacity=9) as buffer:
        buffer.start(Producer(3, crash_at=1))
        assert [item.group_id for item in await buffer.take(4)] == ["0/0", "0/1", "0/2", "1/0"]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="engine gone"):
                await buffer.take(1)


async def test_a_waiting_reader_wakes_up_on_a_crash() -> None:
    async def crash(buffer: RolloutBuffer) -> None:
        await asyncio.sleep(0.01)
        raise RuntimeError("late")

    async with RolloutBuffer(max_staleness=0, capacity=1) as buffer:
        buffer.start(crash)
        with pytest.raises(RuntimeError, match="late"):
            await asyncio.wait_for(anext(buffer), 1.0)


async def test_leaving_cancels_the_producer_and_waits() -> None:
    producer = Producer(9)
    async with RolloutBuffer(max_staleness=0, capacity=3) as buffer:
        buffer.start(producer)
        await buffer.take(1)
    assert producer.cancelled
    assert len(asyncio.all_tasks()) == 1


async def test_misuse() -> None:
    with pytest.raises(ValueError, match="max_staleness=-1"):
        RolloutBuffer(max_staleness=-1, capacity=1)
    with pytest.raises(ValueError, match="capacity=0"):
        RolloutBuffer(max_staleness=0, capacity=0)
    async with RolloutBuffer(max_staleness=0, capacity=1, version=3) as buffer:
        buffer.start(Producer(1))
        with pytest.raises(InvariantError, match="has a producer already"):
            buffer.start(Producer(1))
        with pytest.raises(InvariantError, match="went back from 3 to 2"):
            await buffer.advance(2)
