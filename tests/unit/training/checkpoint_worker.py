"""Checkpoints of three gloo ranks that share the optimiser's state: `checkpoint_worker.py FOLDER`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import forked_ranks
import pytest
import torch

from swe_rl.errors import CheckpointError
from swe_rl.training import checkpoint

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


if __name__ == "__main__":
    target = Path(sys.argv[1])
    forked_ranks.fork(target, [3], lambda rank, _: work(target / "run", rank))
