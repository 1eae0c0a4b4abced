"""Updates of weights for replicas without vLLM, and a group that stands in for NCCL's."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_fakes import WEIGHTS, FakeReplica, fake_engine

from swe_rl.inference.vllm import device_transfer
from swe_rl.inference.vllm.engine import VllmEngine
from swe_rl.inference.weight_update import UpdatePlan, WeightBucket, WeightPiece
from swe_rl.ops import weight_delta


class Group:
    """In place of NCCL's: what rank 0 broadcasts lies before every replica. Of a group that was destroyed nothing
    arrives any more."""

    def __init__(self, replicas: tuple[FakeReplica, ...]) -> None:
        self.replicas, self.destroyed = replicas, 0
        self.worlds: list[dict[str, Any]] = []

    def open(self, world: dict[str, Any]) -> _Joined:
        self.worlds.append(world)
        return _Joined(self)


class _Joined:
    """One of them, as its rank 0 has it. Broadcasts come from a thread of their own."""

    def __init__(self, group: Group) -> None:
        self._group, self._open, self._lock = group, True, threading.Lock()

    def broadcast(self, tensor: Tensor, *, src: int, stream: Any) -> None:
        assert (src, stream) == (0, None)
        with self._lock:
            for replica in self._group.replicas if self._open else ():
                replica.broadcasts.append(tensor.clone())

    def destroy(self) -> None:
        with self._lock:
            self._open = False
            self._group.destroyed += 1


def nccl(monkeypatch: pytest.MonkeyPatch, *replicas: FakeReplica, **changes: Any) -> tuple[VllmEngine, Group]:
    group = Group(replicas)
    monkeypatch.setattr(device_transfer, "_open_group", group.open)
    return fake_engine(*replicas, weight_transfer="nccl", **changes), group


def weights(version: int) -> dict[str, Tensor]:
    return {name: tensor + version for name, tensor in WEIGHTS.items()}


def sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: weight_delta.checksum(tensor) for name, tensor in tensors.items()}


def plan(version: int) -> UpdatePlan:
    shapes = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}
    return UpdatePlan(version=version, base_version=None, stream="s", dtype="float32", shapes=shapes)


async def publish(engine: VllmEngine, version: int, *, checksums: Mapping[str, int] | None = None) -> list[str]:
    """The first tensor in two buckets, the second with the rest of it."""
    new = weights(version)
    assert await engine.start_weight_update(plan(version))
    flat, other = new["a.weight"].view(-1), new["b.weight"]
    await engine.receive_weights(WeightBucket((WeightPiece(name="a.weight", first=0, values=flat[:4]),)))
    rest = WeightPiece(name="a.weight", first=4, values=flat[4:]), WeightPiece(name="b.weight", first=0, values=other)
    await engine.receive_weights(WeightBucket(rest))
    return await engine.finish_weight_update(sums(new) if checksums is None else checksums)


def holds(replica: FakeReplica, version: int) -> bool:
    return replica.held == version and all(
        torch.equal(replica.weights[name], t) for name, t in weights(version).items()
    )
