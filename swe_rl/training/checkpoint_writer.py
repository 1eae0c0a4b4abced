"""Checkpoints while training goes on: written by a thread, from copies in host memory, over a process group of its own.

writer = CheckpointWriter(behind=cfg.async_checkpoints)
writer.save(run_dir, backend, step=12, ...)     # waits for the one before
writer.finish()                                 # it is on disk, or CheckpointError
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from swe_rl.errors import CheckpointError
from swe_rl.protocols import TrainerBackend
from swe_rl.training import checkpoint, mesh

log = logging.getLogger(__name__)

GRACE_S = 60.0  # at the end of a process, for what is being written; ranks may wait there for one that is gone


class CheckpointWriter:
    """One checkpoint at a time; not `behind`, `save` returns when it is on disk. `save` and `finish` are collective and
    raise CheckpointError on every rank when a disk refused."""

    def __init__(self, *, behind: bool) -> None:
        self._group = mesh.group_of_all() if behind else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint") if behind else None
        self._pending: Future[Path] | None = None

    def save(self, run_dir: str | Path, backend: TrainerBackend, **options: Any) -> None:
        """checkpoint.save of the backend's state as it is now. Behind training it takes this rank's part of the state
        once more in host memory. When the one before was refused by a disk, this one is written at once."""
        refused = False
        try:
            self.finish()
        except CheckpointError as err:
            log.warning("%s; the next one is written at once", err)
            refused = True
        if self._thread is None or refused:
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
        """What is being written is written to its end, within GRACE_S; what went wrong with it is logged. Idempotent,
        and for a process whose other ranks may be gone."""
        pending, self._pending = self._pending, None
        if pending is not None and not wait([pending], timeout=GRACE_S).done:
            log.warning("a checkpoint was not written within %.0f s of the end: the one before it stays", GRACE_S)
        elif pending is not None and (err := pending.exception()) is not None:
            log.warning("%s", err)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
