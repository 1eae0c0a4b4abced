"""Where published weights lie: the room is taken before anything is written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from torch import Size

from swe_rl.inference.vllm import store as store_module
from swe_rl.inference.vllm.store import WeightStore

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
