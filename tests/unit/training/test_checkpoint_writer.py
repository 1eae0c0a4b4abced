"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import closing
from pathlib import Path
from typing import Any

import checkpoint_worker
import forked_ranks
import pytest
import torch
from torch import Tensor

from swe_rl.errors import CheckpointError
from swe_rl.training import checkpoint
from swe_rl.training.checkpoint_writer import CheckpointWriter

Make = Callable[..., Any]


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    with closing(CheckpointWriter(behind=True)) as made:
        yield made


class SlowDisk:
    """Writes nothing until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._save = torch.save
        monkeypatch.setattr(torch, "save", self.save)

    def save(self, *arguments: Any, **options: Any) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        self._save(*arguments, **options)


def copied(weights: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_holds_what_was_there_when_it_began(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writer: CheckpointWriter,
    make_backend: Make,
    make_batches: Make,
    optimizer: str,
) -> None:
    backend, batches = make_backend(optimizer=optimizer), make_batches()
    backend.train_step(batches, learning_rate=1e-2)
    before = copied(backend.weights())
    disk = SlowDisk(monkeypatch)
    writer.save(tmp_path, backend, step=1, counters={"step": 1})
    assert disk.begun.wait(60)
    backend.train_step(batches, learning_rate=1e-2)
    assert checkpoint.latest(tmp_path) is None
    assert not all(torch.equal(before[name], tensor) for name, tensor in backend.weights().items())
    disk.go_on.set()
    writer.finish()
    path = checkpoint.latest(tmp_path)
    assert path is not None
    saved = checkpoint.load(path)
    assert saved.counters == {"step": 1}
    assert all(torch.equal(tensor, before[name]) for name, tensor in saved.backend["model"].items())
    resumed = make_backend(seed=3, optimizer=optimizer)
    resumed.load_state_dict(saved.backend)
    resumed.train_step(batches, learning_rate=1e-2)
    after = resumed.weights()
    assert all(torch.equal(after[name], tensor) for name, tensor in backend.weights().items())


def test_one_is_written_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: CheckpointWriter, make_backend: Make
) -> None:
    backend, disk = make_backend(), SlowDisk(monkeypatch)
    writer.save(tmp_path, backend, step=1)
    second = threading.Thread(target=writer.save, args=(tmp_path, backend), kwargs={"step": 2, "keep": 1})
    second.start()
    second.join(0.2)
    assert second.is_alive(), "it waits for the first"
    disk.go_on.set()
    second.join(60)
    writer.finish()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_full_disk_is_told_of_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: CheckpointWriter, make_backend: Make
) -> None:
    backend = make_backend()

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError("no space left on device")

    for tells in (writer.finish, lambda: writer.save(tmp_path, backend, step=2)):
        with monkeypatch.context() as patched:
            patched.setattr(torch, "save", full)
            writer.save(tmp_path, backend, step=1)
            with pytest.raises(CheckpointError, match="no space left on device"):
                tells()
    writer.save(tmp_path, backend, step=3)
    writer.finish()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_disk_that_refused_one_gets_the_next_one_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    writer: CheckpointWriter,
    make_backend: Make,
    ends: bool,
) -> None:
    """What an interrupted run writes last is not lost by what went wrong before; and if nothing follows, a line says
    what went wrong."""
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", lambda *arguments: (_ for _ in ()).throw(OSError("no space left on device")))
        writer.save(tmp_path, make_backend(), step=1)
        wait([writer._pending] if writer._pending else [])
    if ends:
        writer.close()
    else:
        writer.save(tmp_path, make_backend(), step=2)
    latest = checkpoint.latest(tmp_path)
    assert (latest and latest.name) == (None if ends else "step-00000002")
    assert "no space left on device" in caplog.text


def test_a_process_that_ends_finishes_what_it_writes(tmp_path: Path, make_backend: Make) -> None:
    with closing(CheckpointWriter(behind=True)) as made:
        made.save(tmp_path, make_backend(), step=1)
    assert checkpoint.latest(tmp_path) is not None


def test_without_it_a_checkpoint_is_there_at_once(tmp_path: Path, make_backend: Make) -> None:
    with closing(CheckpointWriter(behind=False)) as made:
        made.save(tmp_path, make_backend(), step=1)
        assert checkpoint.latest(tmp_path) is not None
        made.finish()


@pytest.mark.slow
def test_ranks_agree_beside_the_collectives_of_training(tmp_path: Path) -> None:
    """The worker asserts, with one rank's disk slow and then full."""
    forked_ranks.start(checkpoint_worker, tmp_path, "behind")
