"""Replicas that do not start, do not end, or are lost while the trainer has their device; how long an outage was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from vllm_fakes import STOP, WEIGHTS, FakeReplica, eventually, fake_engine

from swe_rl.errors import EngineError
from swe_rl.inference.vllm import engine as engine_module
from swe_rl.inference.vllm import fleet as fleet_module
from swe_rl.inference.vllm.engine import VllmEngine
from swe_rl.inference.vllm.requests import ReplicaChunk, ReplicaRequest
from swe_rl.inference.weight_update import UpdatePlan
from swe_rl.protocols import OutageClock, SamplingParams

PARAMS = SamplingParams(max_new_tokens=6, stop_ids=(STOP,), seed=0)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WATCH_S", 0.01)
    monkeypatch.setattr(fleet_module, "RETRY_S", 0.0)
    monkeypatch.setattr(fleet_module, "GRACE_S", 0.0)


class Stubborn(FakeReplica):
    """`start` and `close` wait for an event that never comes, when they are told to."""

    def __init__(self, name: str, *, hangs: str) -> None:
        super().__init__(name)
        self.hangs = hangs

    async def start(self) -> None:
        await super().start()
        if self.hangs == "start":
            await asyncio.Event().wait()

    async def close(self) -> None:
        await super().close()
        if self.hangs == "close":
            await asyncio.Event().wait()


def lose(engine: VllmEngine, index: int) -> None:
    (place,) = [place for place in engine.fleet.usable() if place.index == index]
    engine.fleet.replace(place, EngineError("lost"))


async def test_a_start_that_hangs_is_an_error_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "START_S", 0.05)
    good, bad = FakeReplica("good"), Stubborn("bad", hangs="start")
    with pytest.raises(EngineError, match="bad did not start within 0 s"):
        await asyncio.wait_for(fake_engine(good, bad).start(), timeout=10)
    assert good.events[-1] == bad.events[-1] == "close"


async def test_an_end_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "CLOSE_S", 0.05)
    engine = fake_engine(Stubborn("bad", hangs="close"))
    await engine.start()
    path = engine._store.path
    await asyncio.wait_for(engine.close(), timeout=10)
    assert not path.exists()


async def test_a_timeout_inside_a_start_is_not_taken_for_ours() -> None:
    replica = FakeReplica("r0")

    async def start() -> None:
        raise TimeoutError("the driver's")

    replica.start = start  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="the driver's"):
        await fake_engine(replica).start()


async def test_a_replica_lost_while_the_trainer_has_its_device_is_started_after_the_step() -> None:
    asleep, lost = FakeReplica("asleep"), FakeReplica("lost")

    async def sleep(level: int) -> None:
        raise engine_module.ReplicaLost("gone")

    async with fake_engine(asleep, lost, layout="colocated") as engine:
        await engine.update_weights(WEIGHTS, version=0)
        lost.sleep = sleep  # type: ignore[method-assign]
        await engine.rest()
        await eventually(lambda: lost.events[-1] == "close")
        await asyncio.sleep(0.05)
        assert lost.events[-1] == "close"  # nothing of it takes the device
        assert asleep.events[-1] == "sleep 2"
        await engine.update_weights(WEIGHTS, version=1)
        await eventually(lambda: lost.held == 1)
        assert asleep.held == 1


async def test_a_replica_that_is_starting_is_up_before_the_trainer_takes_the_device() -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica, layout="colocated") as engine:
        await engine.update_weights(WEIGHTS, version=0)
        replica.fail_after = [2]
        await engine.generate([11, 12], PARAMS, session="s")
        lose(engine, 0)
        await engine.rest()
        assert replica.events[-3:] == ["start", "load 0", "sleep 2"]


async def test_nobody_is_given_a_replica_that_rests_or_has_no_weights_yet() -> None:
    asleep = asyncio.Event()

    class Slow(FakeReplica):
        async def sleep(self, level: int) -> None:
            await super().sleep(level)
            await asleep.wait()

        async def wake(self, tags: list[str] | None = None) -> None:
            await super().wake(tags)
            self.held = -1  # level 2 dropped them
            await asyncio.sleep(0.02)

    replica = Slow("r0")
    async with fake_engine(replica, layout="colocated") as engine:
        await engine.update_weights(WEIGHTS, version=0)
        rest = asyncio.create_task(engine.rest())
        await eventually(lambda: replica.events[-1] == "sleep 2")
        turn = asyncio.create_task(engine.generate([11, 12], PARAMS, session="s"))
        await asyncio.sleep(0.05)
        asleep.set()
        await rest
        await asyncio.sleep(0.05)
        assert not replica.requests
        await engine.update_weights(WEIGHTS, version=1)
        done = await asyncio.wait_for(turn, timeout=10)
        assert (done.policy_version, done.policy_version_max) == (1, 1)
        assert (engine.counters.restarts, engine.counters.stale_replicas) == (0, 0)


async def test_a_replica_that_is_lost_while_others_start_is_up_before_the_trainer_takes_the_device() -> None:
    may_start, second = asyncio.Event(), asyncio.Event()

    class Slow(FakeReplica):
        async def start(self) -> None:
            await super().start()
            if len(self.events) > 1:
                await (may_start if self.name == "r0" else second).wait()

    replicas = Slow("r0"), Slow("r1")
    async with fake_engine(*replicas, layout="processes") as engine:
        await engine.update_weights(WEIGHTS, version=0)
        lose(engine, 0)
        await asyncio.sleep(0.02)
        rest = asyncio.create_task(engine.rest())
        await asyncio.sleep(0.02)
        lose(engine, 1)
        await eventually(lambda: replicas[1].events[-1] == "start")
        may_start.set()
        await asyncio.sleep(0.05)
        assert not rest.done(), "the second one is starting: it takes the device"
        second.set()
        await asyncio.wait_for(rest, timeout=10)
        assert [replica.events[-1] for replica in replicas] == ["sleep 2", "sleep 2"]


async def test_a_replica_that_starts_after_an_update_with_wrong_bits_waits_for_the_next_one() -> None:
    replicas = FakeReplica("r0"), FakeReplica("r1")
    plan = UpdatePlan(
        version=1,
        base_version=None,
        stream="s",
        dtype="float32",
        shapes={name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()},
    )
    async with fake_engine(*replicas) as engine:
        await engine.update_weights(WEIGHTS, version=0)
        assert await engine.start_weight_update(plan)
        assert await engine.finish_weight_update(dict.fromkeys(WEIGHTS, 1)) == list(WEIGHTS)
        lose(engine, 0)
        await eventually(lambda: replicas[0].events[-1] == "start")
        turn = asyncio.create_task(engine.generate([11, 12], PARAMS, session="s"))
        await asyncio.sleep(0.05)
        assert [place.index for place in engine.fleet.usable()] == [1]
        with pytest.raises(EngineError, match="publish all of them first"):
            await engine.rest()
        await engine.update_weights(WEIGHTS, version=1)
        await eventually(lambda: len(engine.fleet.usable()) == 2)
        assert [replica.held for replica in replicas] == [1, 1]
        assert (await asyncio.wait_for(turn, timeout=10)).policy_version_max == 1
        assert (engine.counters.restarts, engine.counters.stale_replicas) == (1, 0)


async def test_a_replica_that_was_given_up_counts_again_once_all_were_started_anew() -> None:
    may_start = asyncio.Event()
    may_start.set()

    class Slow(FakeReplica):
        async def start(self) -> None:
            await may_start.wait()
            await super().start()

    slow, bad = Slow("slow"), FakeReplica("bad")
    async with fake_engine(slow, bad) as engine:
        await engine.update_weights(WEIGHTS, version=0)

        async def give_up(index: int, replica: FakeReplica) -> None:
            replica.refuse_start = ["no memory"] * fleet_module.START_TRIES
            lose(engine, index)
            await eventually(lambda: index in engine.fleet._given_up)

        await give_up(0, slow)
        await engine.fleet.start_anew()
        await give_up(1, bad)
        may_start.clear()
        lose(engine, 0)
        turn = asyncio.create_task(engine.generate([11, 12], PARAMS, session="s"))
        await asyncio.sleep(0.05)
        assert not turn.done()  # the slow one will be back
        may_start.set()
        assert (await turn).token_ids


async def test_an_outage_counts_only_while_nobody_can_be_asked() -> None:
    release = asyncio.Event()

    class Slow(FakeReplica):
        async def start(self) -> None:
            if self.events:
                await release.wait()
            await super().start()

    first, second = Slow("r0"), Slow("r1")
    async with fake_engine(first, second) as engine:
        assert isinstance(engine, OutageClock)
        await engine.update_weights(WEIGHTS, version=0)
        lose(engine, 0)
        await asyncio.sleep(0.05)
        assert await engine.outage_s() == 0.0
        began = time.monotonic()
        lose(engine, 1)
        turn = asyncio.create_task(engine.generate([11, 12], PARAMS, session="s"))
        await asyncio.sleep(0.05)
        assert 0.05 <= await engine.outage_s() <= time.monotonic() - began
        release.set()
        await turn
        ended = await engine.outage_s()
        await asyncio.sleep(0.02)
        assert await engine.outage_s() == ended


async def test_the_time_in_which_a_replica_hung_before_it_was_replaced_is_an_outage() -> None:
    hung, other = FakeReplica("hung"), FakeReplica("other")
    async with fake_engine(hung, other, stall_s=0.2) as engine:
        await engine.update_weights(WEIGHTS, version=0)
        hung.hang_after = [2]
        began = time.monotonic()
        assert (await engine.generate([11, 12], PARAMS, session="s")).token_ids
        assert engine.counters.stalls == 1
        assert 0.2 <= await engine.outage_s() <= time.monotonic() - began


async def test_a_silence_that_nobody_waited_to_the_end_of_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes have their own limit, which may come before `stall_s`: with them goes all that is known of the hang."""
    monkeypatch.setattr(fleet_module, "SILENCE_S", 0.1)
    hung = FakeReplica("hung")
    async with fake_engine(hung) as engine:
        await engine.update_weights(WEIGHTS, version=0)
        hung.hang_after = [2, 2]
        began = time.monotonic()
        turns = [asyncio.create_task(engine.generate([11, 12], PARAMS, session=f"s{i}")) for i in range(2)]
        await asyncio.sleep(0.05)
        assert await engine.outage_s() == 0.0, "as yet it may be slow"
        await asyncio.sleep(0.15)
        read = [await engine.outage_s()]
        for turn in turns:
            turn.cancel()
            await asyncio.wait({turn})
            read.append(await engine.outage_s())
        assert 0.1 < read[0] <= read[1] <= read[2] <= time.monotonic() - began
        await asyncio.sleep(0.15)
        assert await engine.outage_s() == read[2], "nobody waits for it"
        await engine.generate([11, 12], PARAMS, session="later")
        assert await engine.outage_s() == read[2]
        assert engine.counters.restarts == 0


async def test_two_replicas_that_hang_together_lose_each_second_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "SILENCE_S", 0.1)
    replicas = [FakeReplica("r0"), FakeReplica("r1")]
    async with fake_engine(*replicas, stall_s=0.3) as engine:
        await engine.update_weights(WEIGHTS, version=0)
        for replica in replicas:
            replica.hang_after = [2]
        began = time.monotonic()
        await asyncio.gather(*(engine.generate([11, 12], PARAMS, session=f"s{i}") for i in range(2)))
        assert engine.counters.stalls == 2
        assert 0.3 <= await engine.outage_s() <= time.monotonic() - began


async def test_what_is_learned_late_about_an_earlier_start_does_not_end_the_present_one() -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica) as engine:
        await engine.update_weights(WEIGHTS, version=0)
        (early,) = engine.fleet.usable()
        taken = await engine.fleet.take("s")
        assert engine.fleet.present(early)
        lose(engine, 0)
        assert not engine.fleet.present(early)
        await eventually(engine.fleet.usable)
        events, (now,) = list(replica.events), engine.fleet.usable()
        for late in (early, taken):
            assert not engine.fleet.present(late)
            engine.fleet.replace(late, EngineError("its connection was reset"))
        await asyncio.sleep(0.02)
        assert (replica.events, engine.counters.restarts) == (events, 1)
        assert engine.fleet.present(now)
        engine.fleet.replace(now, EngineError("lost"))
        assert engine.counters.restarts == 2


async def test_a_turn_that_missed_the_restart_of_its_replica_is_asked_again_and_the_new_start_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The restart was done between two looks of the turn, whose stream hears of it only afterwards."""
    monkeypatch.setattr(engine_module, "WATCH_S", 60.0)
    late = asyncio.Event()

    class Deaf(FakeReplica):
        async def stream(self, request: ReplicaRequest) -> AsyncIterator[ReplicaChunk]:
            if len(self.requests) == 1:  # the second one
                self.requests.append(request)
                await late.wait()
                raise engine_module.ReplicaLost("the connection was reset")
            async for chunk in super().stream(request):
                yield chunk

    replica = Deaf("r0")
    async with fake_engine(replica) as engine:
        await engine.update_weights(WEIGHTS, version=0)
        await engine.generate([11], PARAMS, session="other")
        turn = asyncio.create_task(engine.generate([11, 12], PARAMS, session="s"))
        await eventually(lambda: len(replica.requests) == 2)
        lose(engine, 0)
        await eventually(engine.fleet.usable)
        late.set()
        assert (await asyncio.wait_for(turn, timeout=10)).token_ids == [2, 3, 4, 5, 6, STOP]
        assert engine.counters.restarts == 1
        assert engine.counters.resubmitted == 1
