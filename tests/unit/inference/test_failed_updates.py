"""Updates of the weights that fail on the way: what is lost comes back, and the next update is a whole one."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import pytest
from vllm_fakes import FakeReplica, eventually, fake_engine
from vllm_transfers import holds, nccl, plan, publish, weights

from swe_rl.errors import EngineError
from swe_rl.inference.vllm import device_transfer, fleet
from swe_rl.inference.vllm.replica import ReplicaLost
from swe_rl.inference.weight_update import WeightBucket, WeightPiece


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "RETRY_S", 0.0)
    monkeypatch.setattr(device_transfer, "ipc_handle", lambda tensor: tensor)


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, err: Exception) -> None:
    own = getattr(owner, method)

    def fails(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, method, own)
        raise err

    async def fails_later(*arguments: Any, **options: Any) -> Any:
        fails()

    monkeypatch.setattr(owner, method, fails_later if inspect.iscoroutinefunction(own) else fails)


@pytest.mark.parametrize("way", ["host", "ipc"])
async def test_a_replica_that_died_asleep_comes_back(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica, weight_transfer=way, layout="colocated") as engine:
        await publish(engine, 0)
        await engine.rest()
        fails_once(monkeypatch, replica, "wake", ReplicaLost("r0 was killed"))
        assert await publish(engine, 1) == []
        await eventually(engine.fleet.usable)
        assert holds(replica, 1)
        assert engine.counters.restarts == 1


async def test_weights_that_a_worker_refuses_cost_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = FakeReplica("r0")
    engine, group = nccl(monkeypatch, replica)
    async with engine:
        await publish(engine, 0)
        fails_once(monkeypatch, replica, "update", EngineError("b.weight did not arrive as it was sent"))
        with pytest.raises(EngineError, match="did not arrive as it was sent"):
            await publish(engine, 1)
        assert group.destroyed == 1, "its broadcast would wait for ever"
        replica.broadcasts.clear()
        assert await publish(engine, 2) == []
        assert holds(replica, 2)
        assert (len(group.worlds), len(replica.joined)) == (2, 2)


async def test_an_update_that_is_cancelled_costs_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = FakeReplica("r0")
    engine, group = nccl(monkeypatch, replica)
    async with engine:
        await publish(engine, 0)
        told, own = asyncio.Event(), replica.update

        async def hangs(info: Any) -> None:
            told.set()
            await asyncio.sleep(3600)

        monkeypatch.setattr(replica, "update", hangs)
        task = asyncio.create_task(publish(engine, 1))
        await told.wait()
        await eventually(lambda: len(replica.broadcasts) == 2)
        task.cancel()
        await asyncio.wait({task})
        assert group.destroyed == 1
        monkeypatch.setattr(replica, "update", own)
        replica.broadcasts.clear()
        assert await publish(engine, 2) == []
        assert holds(replica, 2)


async def test_receivers_of_an_update_that_did_not_start_get_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = FakeReplica("r0"), FakeReplica("r1")
    engine, _ = nccl(monkeypatch, *replicas)
    async with engine:
        await publish(engine, 0)
        fails_once(monkeypatch, replicas[1], "open_update", EngineError("refused"))
        with pytest.raises(EngineError, match="refused"):
            await publish(engine, 1)
        assert [replica.events[-1] for replica in replicas] == ["abandon", "close_update 0"]
        await engine.update_weights(weights(2), version=2)
        assert all(holds(replica, 2) for replica in replicas)
        assert engine.counters.restarts == 0


async def test_an_update_that_no_replica_was_told_of_is_ended_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = FakeReplica("r0"), FakeReplica("r1")
    engine, _ = nccl(monkeypatch, *replicas)
    async with engine:
        fails_once(monkeypatch, replicas[1], "join", EngineError("refused"))
        with pytest.raises(EngineError, match="refused"):
            await publish(engine, 1)
        assert not any("abandon" in replica.events for replica in replicas)
        assert await publish(engine, 2) == []
        assert all(holds(replica, 2) for replica in replicas)
        assert engine.counters.restarts == 0


async def test_a_replica_that_has_finished_an_update_goes_on_when_another_one_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = FakeReplica("r0"), FakeReplica("r1")
    engine, _ = nccl(monkeypatch, *replicas)
    async with engine:
        await publish(engine, 0)
        fails_once(monkeypatch, replicas[1], "close_update", EngineError("refused"))
        with pytest.raises(EngineError, match="refused"):
            await publish(engine, 1)
        assert [replica.events[-1] for replica in replicas] == ["close_update 1", "abandon"]
        assert await publish(engine, 2) == []
        assert all(holds(replica, 2) for replica in replicas)
        assert engine.counters.restarts == 0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_copy_that_fails_half_way_is_offered_to_no_replica(
    monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica) as engine:
        await publish(engine, 0)
        with pytest.raises(EngineError, match="missing names"):
            await engine.update_weights({}, version=1)
        assert engine._whole.is_set(), "nothing was touched"
        fails_once(monkeypatch, engine._store, "copy", asyncio.CancelledError() if cancelled else MemoryError())
        with pytest.raises(asyncio.CancelledError if cancelled else MemoryError):
            await engine.update_weights(weights(1), version=1)
        engine.fleet.replace(engine.fleet.usable()[0], EngineError("lost"))
        await eventually(lambda: replica.events[-2:] == ["close", "start"])
        await asyncio.sleep(0.05)
        assert engine.fleet.usable() == []
        await engine.update_weights(weights(2), version=2)
        await eventually(engine.fleet.usable)
        assert holds(replica, 2)


async def test_a_bucket_of_no_update_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica) as engine:
        await publish(engine, 0)
        piece = WeightPiece(name="a.weight", first=0, values=weights(1)["a.weight"].view(-1))
        with pytest.raises(EngineError):
            await engine.receive_weights(WeightBucket((piece,)))
        engine.fleet.replace(engine.fleet.usable()[0], EngineError("lost"))
        await eventually(engine.fleet.usable)
        assert holds(replica, 0)


async def test_receivers_of_an_update_that_did_not_finish_get_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = FakeReplica("r0")
    engine, _ = nccl(monkeypatch, replica)
    async with engine:
        await publish(engine, 0)
        fails_once(monkeypatch, engine._inbox, "finish", MemoryError())
        with pytest.raises(MemoryError):
            await publish(engine, 1)
        await engine.update_weights(weights(2), version=2)
        assert holds(replica, 2)


async def test_what_an_update_left_half_way_is_loaded_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica) as engine:
        await publish(engine, 0)
        fails_once(monkeypatch, engine._inbox, "finish", MemoryError())
        with pytest.raises(MemoryError):
            await publish(engine, 1)
        engine.fleet.replace(engine.fleet.usable()[0], EngineError("lost"))
        await eventually(lambda: replica.events[-2:] == ["close", "start"])
        await asyncio.sleep(0.05)
        assert engine.fleet.usable() == []
        with pytest.raises(EngineError, match="publish all of them first"):
            await engine.rest()
        await engine.update_weights(weights(2), version=2)
        await eventually(engine.fleet.usable)
        assert holds(replica, 2)


async def test_an_update_that_is_cancelled_as_it_ends_another_one_holds_up_no_third(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica, weight_transfer="ipc", layout="colocated") as engine:
        await publish(engine, 0)
        told = asyncio.Event()

        async def hangs() -> None:
            told.set()
            await asyncio.sleep(3600)

        own = replica.abandon_update
        monkeypatch.setattr(replica, "abandon_update", hangs)
        assert await engine.start_weight_update(plan(1))
        task = asyncio.create_task(engine.start_weight_update(plan(2)))
        await told.wait()
        task.cancel()
        await asyncio.wait({task})
        monkeypatch.setattr(replica, "abandon_update", own)
        assert await asyncio.wait_for(publish(engine, 3), 20) == []
        assert holds(replica, 3)
        assert replica.events.count("abandon") == 1, "which had not been told yet"


async def test_a_receiver_that_cannot_end_an_update_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_transfer, "ABANDON_S", 0.02)
    replicas = FakeReplica("r0"), FakeReplica("r1")
    engine, _ = nccl(monkeypatch, *replicas)
    async with engine:
        await publish(engine, 0)
        sender: Any = engine._sender
        (first, second) = engine.fleet.usable()
        await sender.start()
        monkeypatch.setattr(replicas[0], "abandon_update", lambda: asyncio.sleep(3600))
        await sender.start()
        assert (sender.receives(first), sender.receives(second)) == (False, True)
        assert [replica.events.count("open") for replica in replicas] == [2, 3]
        await eventually(lambda: len(engine.fleet.usable()) == 2)
        assert engine.counters.restarts == 1


async def test_a_receiver_that_is_replaced_between_two_buckets_is_not_told_of_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = FakeReplica("r0"), FakeReplica("r1")
    engine, group = nccl(monkeypatch, *replicas)
    async with engine:
        await publish(engine, 0)
        start = engine.start_weight_update

        async def started(of: Any) -> bool:
            suits = await start(of)
            engine.fleet.replace(engine.fleet.usable()[0], EngineError("does not answer"))
            return suits

        monkeypatch.setattr(engine, "start_weight_update", started)
        assert await publish(engine, 1) == []
        await eventually(lambda: len(engine.fleet.usable()) == 2)
        assert all(replica.events[-1] == "load 1" and holds(replica, 1) for replica in replicas)
        assert (group.destroyed, engine.counters.restarts) == (1, 2)


async def test_what_travels_is_described_once_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    own, threads = device_transfer.described, list[Any]()

    def described(named: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return own(named)

    monkeypatch.setattr(device_transfer, "described", described)
    engine, _ = nccl(monkeypatch, FakeReplica("r0"), FakeReplica("r1"))
    async with engine:
        await publish(engine, 0)
    async with fake_engine(FakeReplica("r0"), weight_transfer="ipc", layout="colocated") as engine:
        await publish(engine, 0)
    assert len(threads) == 2
    assert threading.main_thread() not in threads
