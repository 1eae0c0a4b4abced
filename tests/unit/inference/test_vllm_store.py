"""Where published weights lie: the room is taken before anything is written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Size
from vllm_fakes import WEIGHTS, FakeReplica, fake_engine

from swe_rl.errors import EngineError
from swe_rl.inference.vllm import store as store_module
from swe_rl.inference.vllm.opening import Node, open_store
from swe_rl.inference.vllm.store import WeightStore
from swe_rl.inference.weight_update import UpdatePlan, WeightBucket, WeightPiece
from swe_rl.ops.weight_delta import checksum, compare

SHAPES = {"a.weight": Size([1 << 18]), "b.weight": Size([3, 5])}


def test_the_file_has_its_room_from_the_start() -> None:
    store = WeightStore(SHAPES, dtype="float32")
    try:
        assert store.path.stat().st_blocks * 512 >= store.path.stat().st_size >= 4 << 18
    finally:
        store.close()
    assert not store.path.parent.exists()


def test_weights_of_a_killed_process_are_removed_and_those_in_use_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(store_module, "SHARED_MEMORY", tmp_path)
    left, fresh = tmp_path / "swe-rl-weights-left", tmp_path / "swe-rl-weights-fresh"
    for folder in (left, fresh):
        folder.mkdir()
        (folder / "weights").write_bytes(b"x")
    used = WeightStore(SHAPES, dtype="float32")
    for folder in (left, used.path.parent):
        os.utime(folder, (1.0, 1.0))
    other = WeightStore(SHAPES, dtype="float32")
    assert not left.exists()  # nobody holds its lock
    assert fresh.exists()  # its owner may be about to take it
    assert used.path.exists()
    used.close()
    other.close()


def test_without_room_in_shared_memory_the_weights_go_elsewhere_and_without_any_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(store_module, "SHARED_MEMORY", memory)
    monkeypatch.setattr(store_module.tempfile, "tempdir", str(disk))
    full = {memory}
    reserve = os.posix_fallocate

    def posix_fallocate(descriptor: int, start: int, size: int) -> None:
        where = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if any(place in where.parents for place in full):
            raise OSError(errno.ENOSPC, "no room")
        reserve(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    store = WeightStore(SHAPES, dtype="float32")  # other ranks took it between the look and the reservation
    assert disk in store.path.parents
    store.close()
    full.add(disk)
    with pytest.raises(OSError, match="no room"):
        WeightStore(SHAPES, dtype="float32")
    assert not [*memory.iterdir(), *disk.iterdir()]


def test_the_processes_of_a_machine_share_what_one_of_them_writes() -> None:
    told: list[str] = []
    leader = open_store(SHAPES, dtype="float32", node=Node(leads=True, tell=lambda path: told.append(path) or path))
    follower = open_store(SHAPES, dtype="float32", node=Node(leads=False, tell=lambda path: told[0]))
    try:
        assert (leader.writes, follower.writes, told) == (True, False, [str(leader.path)])
        generator = torch.Generator().manual_seed(0)
        weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        sums = leader.copy(weights)
        assert follower.location(sums, version=3) == leader.location(sums, version=3)
        for name, tensor in weights.items():
            assert torch.equal(follower.targets[name], tensor)
        with pytest.raises(EngineError, match="another process writes these weights"):
            follower.copy(weights)
        with pytest.raises(OSError, match="of another model"):
            WeightStore({"a": Size([2])}, dtype="float32", path=str(leader.path))
    finally:
        follower.close()
        assert leader.path.exists()
        leader.close()
    assert not leader.path.exists()


def test_without_room_the_others_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def no_room(num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(store_module, "_reserved", no_room)
    with pytest.raises(OSError, match="no room"):
        open_store(SHAPES, dtype="float32", node=Node(leads=True, tell=lambda path: told.append(path) or path))
    assert told == [""]
    with pytest.raises(OSError, match="No such file"):
        open_store(SHAPES, dtype="float32", node=Node(leads=False, tell=lambda path: told[0]))


@pytest.mark.parametrize("mode", ["full", "delta"])
async def test_one_publisher_and_two_engines_on_one_store(mode: str) -> None:
    """As the ranks of a machine: each gets every bucket, one writes, both have the version with its checksums."""
    leader = fake_engine(FakeReplica("r0"), dtype="bfloat16")
    shapes = {name: tensor.shape for name, tensor in WEIGHTS.items()}
    follower_store = WeightStore(shapes, dtype="bfloat16", path=str(leader._store.path))
    follower = fake_engine(FakeReplica("r1"), dtype="bfloat16", store=follower_store)
    async with leader, follower:
        for version in range(3):
            weights = {name: (tensor + 0.5 * version).bfloat16() for name, tensor in WEIGHTS.items()}
            base = version - 1 if mode == "delta" and version else None
            plain = {name: tuple(shape) for name, shape in shapes.items()}
            plan = UpdatePlan(version=version, base_version=base, stream="s", dtype="bfloat16", shapes=plain)
            before = {name: tensor.clone() for name, tensor in leader._store.targets.items()}
            pieces = [
                WeightPiece(
                    name=name,
                    first=0,
                    values=tensor.reshape(-1)
                    if base is None
                    else compare(before[name].reshape(-1), tensor.reshape(-1)),
                )
                for name, tensor in weights.items()
            ]
            sums = {name: checksum(tensor) for name, tensor in weights.items()}
            for engine in (leader, follower):
                assert await engine.start_weight_update(plan)
            for engine in (follower, leader):
                await engine.receive_weights(WeightBucket(tuple(pieces)))
            for engine in (leader, follower):
                assert await engine.finish_weight_update(sums) == []
                (replica,) = engine.replicas
                assert replica.held == version  # type: ignore[attr-defined]
                for name, tensor in weights.items():
                    assert torch.equal(replica.weights[name], tensor)  # type: ignore[attr-defined]
