"""Sandboxes started ahead: in order, within the limit, each used once, none left."""

from __future__ import annotations

import asyncio

import pytest

from swe_rl.errors import ConfigError, SandboxError, SweRlError
from swe_rl.sandbox.warm_pool import MAX_AGE_S, WarmPool, spec_digest
from swe_rl.testing import FakeSandbox
from swe_rl.types import Limits, SandboxSpec


def spec(name: str) -> SandboxSpec:
    return SandboxSpec(layers=(f"/trees/{name}",))


class Maker:
    """Starts and ends fakes; `room` is how many may be alive."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.started: list[str] = []
        self.alive: dict[FakeSandbox, str] = {}
        self.failure: Exception | None = None

    async def start(self, of: SandboxSpec) -> FakeSandbox | None:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        if len(self.alive) >= self.room:
            return None
        self.started.append(of.layers[0][-1])
        sandbox = FakeSandbox()
        self.alive[sandbox] = of.layers[0][-1]
        return sandbox

    async def stop(self, of: SandboxSpec, sandbox: FakeSandbox) -> None:
        await sandbox.close()
        del self.alive[sandbox]


def pool_of(maker: Maker, limit: int) -> WarmPool:
    return WarmPool(maker.start, maker.stop, limit=limit)  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_it_fills_in_the_known_order_up_to_the_limit() -> None:
    maker = Maker()
    pool = pool_of(maker, 3)
    pool.expect([spec("a"), spec("a"), spec("b"), spec("c"), spec("c")])
    await settle()
    assert maker.started == ["a", "a", "b"]
    first, second = pool.take(spec("a")), pool.take(spec("a"))
    assert first is not None
    assert second is not None
    assert first is not second
    assert pool.take(spec("a")) is None  # each is handed out once
    pool.fill()
    await settle()
    assert maker.started == ["a", "a", "b", "c", "c"]
    await pool.close()
    assert {maker.alive[first], maker.alive[second]} == {"a"}  # those are the takers' to close
    assert len(maker.alive) == 2


async def test_a_cold_start_takes_one_expectation_away() -> None:
    maker = Maker(room=0)
    pool = pool_of(maker, 4)
    pool.expect([spec("a"), spec("b")])
    await settle()
    assert pool.take(spec("b")) is None  # started on the spot by whoever asked
    maker.room = 9
    pool.fill()
    await settle()
    assert maker.started == ["a"]
    await pool.close()


async def test_what_waits_already_counts_for_the_next_list() -> None:
    maker = Maker()
    pool = pool_of(maker, 4)
    pool.expect([spec("a"), spec("b")])
    await settle()
    pool.expect([spec("b"), spec("a"), spec("a")])
    await settle()
    assert maker.started == ["a", "b", "a"]
    await pool.close()
    assert maker.alive == {}


async def test_the_oldest_makes_room_and_old_ones_are_closed() -> None:
    maker = Maker()
    pool = pool_of(maker, 4)
    pool.expect([spec("a"), spec("b")])
    await settle()
    assert await pool.evict()
    assert list(maker.alive.values()) == ["b"]
    loop_now = asyncio.get_running_loop().time()
    assert await pool.drop_old(now=loop_now + MAX_AGE_S / 2) == 0
    assert await pool.drop_old(now=loop_now + 2 * MAX_AGE_S) == 1
    assert not await pool.evict()
    assert maker.alive == {}


@pytest.mark.parametrize("failure", [SandboxError("no daemon"), ConfigError("no such backend")])
async def test_a_failing_start_ends_the_filling_and_a_closed_pool_stays_empty(failure: SweRlError) -> None:
    maker = Maker()
    pool = pool_of(maker, 4)
    maker.failure = failure
    pool.expect([spec("a")])
    await settle()
    assert len(pool) == 0
    maker.failure = None
    pool.fill()
    await settle()
    assert maker.started == []
    await pool.close()
    pool.expect([spec("a")])
    await settle()
    assert maker.started == []


async def test_without_a_limit_nothing_is_started() -> None:
    maker = Maker()
    pool = pool_of(maker, 0)
    pool.expect([spec("a")])
    await settle()
    assert maker.started == []
    assert pool.take(spec("a")) is None


def test_digests_are_of_the_whole_environment() -> None:
    base = spec("a")
    assert spec_digest(base) == spec_digest(spec("a"))
    others = [spec("b"), SandboxSpec(), SandboxSpec(layers=("/trees/a",), limits=Limits(pids=3))]
    others.append(SandboxSpec(layers=("/trees/a",), env={"A": "1"}))
    assert len({spec_digest(item) for item in (base, *others)}) == 5
