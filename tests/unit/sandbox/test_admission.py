"""Buckets that never run over, first come first served, two lanes that do not block each other."""

from __future__ import annotations

import asyncio
import random

import pytest

from swe_rl.sandbox.admission import (
    AGENTS,
    GRADING,
    Lane,
    node_capacity,
    place_demand,
    room_demand,
    split_lanes,
)
from swe_rl.types import Limits, SandboxSpec


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_bucket_runs_over_and_nobody_overtakes() -> None:
    lane = Lane({"places": 3.0, "memory_bytes": 10.0})
    used, peak, order = 0.0, 0.0, []

    async def use(number: int, memory: float) -> None:
        nonlocal used, peak
        demand = {"places": 1.0, "memory_bytes": memory}
        await lane.acquire(demand)
        order.append(number)
        used += memory
        peak = max(peak, used)
        await asyncio.sleep(0.001)
        used -= memory
        lane.release(demand)

    sizes = [random.Random(7).randint(1, 6) for _ in range(60)]
    await asyncio.gather(*(use(number, float(size)) for number, size in enumerate(sizes)))
    assert order == sorted(order)
    assert 6 < peak <= 10
    assert (lane.holders, lane.waiting) == (0, 0)


async def test_a_large_one_at_the_head_is_not_starved_by_small_ones() -> None:
    lane = Lane({"memory_bytes": 10.0})
    await lane.acquire({"memory_bytes": 6.0})
    large = asyncio.create_task(lane.acquire({"memory_bytes": 8.0}))
    await settle()
    assert not lane.try_acquire({"memory_bytes": 1.0})  # there is room, but somebody waits
    lane.release({"memory_bytes": 6.0})
    await settle()
    assert large.done()
    assert lane.waited_s["memory_bytes"] > 0


async def test_what_is_larger_than_the_lane_runs_alone() -> None:
    lane = Lane({"memory_bytes": 10.0})
    await lane.acquire({"memory_bytes": 25.0})
    other = asyncio.create_task(lane.acquire({"memory_bytes": 1.0}))
    await settle()
    assert not other.done()
    lane.release({"memory_bytes": 25.0})
    await settle()
    assert other.done()


async def test_whoever_is_cancelled_while_waiting_holds_nothing() -> None:
    lane = Lane({"places": 1.0})
    await lane.acquire({"places": 1.0})
    waiting = [asyncio.create_task(lane.acquire({"places": 1.0})) for _ in range(3)]
    await settle()
    waiting[0].cancel()
    await settle()
    lane.release({"places": 1.0})  # granted to the second
    waiting[1].cancel()  # in the same round: it must give back what it was just given
    await settle()
    assert waiting[2].done()
    assert not waiting[2].cancelled()
    lane.release({"places": 1.0})
    assert (lane.holders, lane.waiting) == (0, 0)


async def test_a_cancelled_head_no_longer_blocks_those_behind() -> None:
    lane = Lane({"memory_bytes": 10.0})
    await lane.acquire({"memory_bytes": 6.0})
    head = asyncio.create_task(lane.acquire({"memory_bytes": 8.0}))
    behind = asyncio.create_task(lane.acquire({"memory_bytes": 3.0}))
    await settle()
    head.cancel()
    await settle()
    assert behind.done()


async def test_a_charge_beyond_the_bucket_delays_the_next() -> None:
    lane = Lane({"memory_bytes": 10.0})
    await lane.acquire({"memory_bytes": 8.0})
    lane.charge({"memory_bytes": 8.0})  # a fork
    other = asyncio.create_task(lane.acquire({"memory_bytes": 1.0}))
    await settle()
    assert not other.done()
    lane.release({"memory_bytes": 8.0})
    await settle()
    assert other.done()


async def test_agents_who_hold_everything_do_not_keep_grading_from_running() -> None:
    lanes = split_lanes({"memory_bytes": 100.0, "cpus": 2.0}, agents=15, grading=5)
    assert lanes[AGENTS].capacity["memory_bytes"] == pytest.approx(75)
    assert lanes[GRADING].capacity["memory_bytes"] == pytest.approx(25)
    while lanes[AGENTS].try_acquire({"memory_bytes": 5.0, **place_demand(AGENTS)}):
        pass
    assert lanes[AGENTS].holders == 15
    assert lanes[GRADING].try_acquire({"memory_bytes": 5.0})


def test_demands_follow_the_limits_and_files_in_memory_count_as_memory() -> None:
    limits = Limits(memory_bytes=100, disk_bytes=7, pids=9)
    assert room_demand(SandboxSpec(limits=limits)) == {"memory_bytes": 107.0, "pids": 9.0, "disk_bytes": 0.0}
    bare = room_demand(SandboxSpec(limits=limits, isolation="none"))
    assert bare == {"memory_bytes": 100.0, "pids": 9.0, "disk_bytes": 7.0}
    docker = room_demand(SandboxSpec(backend="docker", limits=limits))
    assert docker["disk_bytes"] == 7.0
    assert place_demand(AGENTS)["cpus"] < place_demand(GRADING)["cpus"]


def test_capacity_of_this_machine_is_plausible() -> None:
    found = node_capacity()
    assert found["cpus"] >= 1
    assert 2**28 < found["memory_bytes"] < 2**50
    assert found["pids"] > 100
    assert node_capacity(memory_bytes=5 << 30)["memory_bytes"] == 5 << 30
