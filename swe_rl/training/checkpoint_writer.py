"""Checkpoints while training goes on: written by a thread, from copies in host memory, over a process group of its own.

writer = CheckpointWriter(behind=cfg.async_checkpoints)
writer.save(run_dir, backend, step=12, ...)     # waits for the one before
writer.finish()                                 # it is on disk, or CheckpointError
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from swe_rl.protocols import TrainerBackend
from swe_rl.training import checkpoint, mesh

WRITE_S = 7200.0  # ranks that have written their part wait so long for the slowest


class CheckpointWriter:
    """One checkpoint at a time; not `behind`, `save` returns when it is on disk. `save` and `finish` are collective and
    raise CheckpointError on every rank when a disk refused."""

    def __init__(self, *, behind: bool) -> None:
        self._group = mesh.group_of_all(timeout_s=WRITE_S) if behind else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint") if behind else None
        self._pending: Future[Path] | None = None

    def save(self, run_dir: str | Path, backend: TrainerBackend, **options: Any) -> None:
        """checkpoint.save of the backend's state as it is now. Behind training it takes this rank's part of the state
        once more in host memory, and a disk that refuses is told of by the next call."""
        self.finish()
        if self._thread is None:
            checkpoint.save(run_dir, backend.checkpoint_state(), **options)
            return
        state = backend.checkpoint_state(own=True)
        self._pending = self._thread.submit(partial(checkpoint.save, run_dir, state, group=self._group, **options))

    def finish(self) -> None:
        """Returns when nothing is being written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Alone, a process ends what it writes; ranks may wait for one that is gone, and leave theirs. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=mesh.world_size() == 1)
