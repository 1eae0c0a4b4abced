"""Checkpoints of three gloo ranks that share the optimiser's state: `checkpoint_worker.py FOLDER`."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import forked_ranks
import pytest
import torch

from swe_rl.errors import CheckpointError
from swe_rl.training import checkpoint, mesh
from swe_rl.training.checkpoint_writer import CheckpointWriter

STILL = 1  # the rank that holds nothing


def state(rank: int, value: float) -> dict[str, Any]:
    """Rank 0 has the weights, the others the moments of a parameter of their own."""
    moments = {"step": torch.tensor(2.0), "exp_avg": torch.full((3, rank + 1), value)}
    return {
        "model": {f"p{r}": torch.full((3, r + 1), value) for r in range(3)} if rank == 0 else {},
        "optimizer": {f"p{rank}": {} if rank == STILL else moments},
        "step": 2,
    }


def stale(folder: Path, pattern: str) -> list[Path]:
    """A listing as a network file system may give it: without what the other ranks have just written."""
    return [path for path in folder.glob(f"**/{pattern}") if "-of-" not in path.name]


def work(folder: Path, rank: int) -> None:
    alone = {**state(rank, 3.0), "optimizer": {"p0": {"exp_avg": torch.ones(2)} if rank == 0 else {}}}
    assert [p.name for p in checkpoint.save(folder, alone, step=6).glob("optimizer*")] == ["optimizer.pt"]
    path = checkpoint.save(folder, state(rank, 1.0), step=7, counters={"phase": 3})
    found = checkpoint.load(path)
    assert found.counters == {"phase": 3}
    assert set(found.backend["model"]) == {"p0", "p1", "p2"}
    assert {n: float(m["exp_avg"].sum()) for n, m in found.backend["optimizer"].items()} == {"p0": 3.0, "p2": 9.0}
    names = sorted(p.name for p in path.glob("optimizer*"))
    assert names == ["optimizer-00001-of-00003.pt", "optimizer-00003-of-00003.pt"]
    with mock.patch.object(Path, "rglob", stale):
        again = checkpoint.save(folder, state(rank, 1.0), step=7)
    assert set(checkpoint.load(again).backend["optimizer"]) == {"p0", "p2"}
    own = folder / "own-disk-of-rank-2" / "step-00000008"
    own.mkdir(parents=True, exist_ok=True)
    troubles = {
        "no space left on device": mock.patch("torch.save", side_effect=OSError("no space left on device")),
        "of another rank is not there: put run_dir on a": mock.patch.object(checkpoint, "_writing", return_value=own),
        "rank 2 does not see what rank 0 has begun: put run_dir on a": mock.patch.object(
            checkpoint, "_writing", return_value=folder / "no-such-directory"
        ),
    }
    for words, trouble in troubles.items():  # of rank 2; all hear of it
        with trouble if rank == 2 else contextlib.nullcontext(), pytest.raises(CheckpointError, match=words):
            checkpoint.save(folder, state(rank, 2.0), step=8)
    assert checkpoint.latest(folder) == path
    if rank == 0:
        (path / "optimizer-00003-of-00003.pt").unlink()
        with pytest.raises(CheckpointError, match="cannot be read"):
            checkpoint.load(path)


def work_behind(folder: Path, rank: int) -> None:
    """Ranks agree on collectives of their own all the while; that of rank 2 is the slow disk, and then the full one."""
    writer = CheckpointWriter(behind=True)
    backend: Any = SimpleNamespace(checkpoint_state=lambda *, own=False: {**state(rank, 4.0), "own": own})
    finish = threading.Event()

    def slow(*arguments: Any, **options: Any) -> None:
        if rank == 2:
            assert finish.wait(60)
        torch_save(*arguments, **options)

    torch_save = torch.save
    with mock.patch("torch.save", slow):
        writer.save(folder, backend, step=1)
        for number in range(50):
            assert mesh.gather_objects([rank + number]) == [number, number + 1, number + 2]
        assert checkpoint.latest(folder) is None
        finish.set()
        writer.finish()
    path = checkpoint.latest(folder)
    assert path is not None
    found = checkpoint.load(path).backend
    assert found["own"] is True
    assert {n: float(m["exp_avg"].sum()) for n, m in found["optimizer"].items()} == {"p0": 12.0, "p2": 36.0}
    full = mock.patch("torch.save", side_effect=OSError("no space left on device"))
    with full if rank == 2 else contextlib.nullcontext():
        writer.save(folder, backend, step=2)
        with pytest.raises(CheckpointError, match="no space left on device"):
            writer.save(folder, backend, step=3)
    left = mock.patch.multiple(mesh, rank=lambda: 0, is_main=lambda: True, world_size=lambda: 1)  # the other group
    with left, mock.patch("torch.save", lambda *arguments: (time.sleep(0.3 * rank), torch_save(*arguments))):
        writer.save(folder, backend, step=4)
        writer.close()
    path = checkpoint.latest(folder)
    assert path == folder / "checkpoints" / "step-00000004"
    found = checkpoint.load(path).backend
    assert set(found["model"]) == {"p0", "p1", "p2"}
    assert {name for name, moments in found["optimizer"].items() if moments} == {"p0", "p2"}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    doing = work_behind if sys.argv[2:] == ["behind"] else work
    forked_ranks.fork(target, [3], lambda rank, _: doing(target / "run", rank))
