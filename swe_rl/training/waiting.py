"""Ranks that come at different times wait for each other on the store, with signs of life, and only then communicate.

Rollouts of one rank may end half an hour before those of another. In a collective the others would wait silently, and
run into its time limit (10 minutes with NCCL by default) whether the late one works or is gone. On the store they see
the difference: every rank beats, and one that has stopped is named.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from swe_rl.errors import InvariantError
from swe_rl.training import mesh

BEAT_S, SILENCE_S = 5.0, 180.0
POLL_S = 0.05  # at first; waits get longer by half, up to a beat
log = logging.getLogger(__name__)


class Attendance:
    """Of one rank among `world_size`, each with one of the same `store`. Beats from a thread of its own until closed,
    or until the store has refused for `silence_s` seconds.

    Raises nothing itself; `wait` raises InvariantError that names a rank which has not beaten for `silence_s` seconds.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._store = dist.PrefixStore("swe_rl/attendance", store)
        self._rank, self._world_size, self._beat_s, self._silence_s = rank, world_size, beat_s, silence_s
        self._meetings = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="attendance", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        """One lost connection is no reason to fall silent: the others would take this rank for gone."""
        heard = time.monotonic()
        while not self._closed.is_set():
            try:
                self._store.add(f"beat/{self._rank}", 1)
                heard = time.monotonic()
            except RuntimeError as err:  # what every kind of store raises, torch.distributed.DistError included
                if (refused := time.monotonic() - heard) > self._silence_s:
                    reason = " ".join(str(err).split())[:200]
                    log.warning("rank %d beats no more: the store refused for %.0f s: %s", self._rank, refused, reason)
                    return
            self._closed.wait(self._beat_s)

    def wait(self) -> None:
        """Returns when all ranks have called it as often as this one, however long that takes."""
        self._meetings += 1
        here = f"meeting/{self._meetings}"
        present = self._store.add(here, 1)
        heard = {rank: (0, time.monotonic()) for rank in range(self._world_size)}
        pause, looked = min(POLL_S, self._beat_s), time.monotonic()
        while present < self._world_size:
            time.sleep(pause)
            pause = min(1.5 * pause, self._beat_s)
            if time.monotonic() - looked >= self._beat_s:
                looked = time.monotonic()
                self._listen(heard)
            present = self._store.add(here, 0)

    def _listen(self, heard: dict[int, tuple[int, float]]) -> None:
        """Updates (beats, when they last were more) of every rank."""
        now = time.monotonic()
        for rank, (beats, since) in heard.items():
            found = self._store.add(f"beat/{rank}", 0)
            if found != beats:
                heard[rank] = (found, now)
            elif now - since > self._silence_s:
                raise InvariantError(
                    f"rank {rank} has given no sign of life for {now - since:.0f} s while rank {self._rank} waits for "
                    "it: look at its node and its log; the run can be resumed from its last checkpoint"
                )

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=1)


def open_attendance() -> tuple[Callable[[Sequence[Any]], list[Any]], Callable[[], None]]:
    """(mesh.gather_objects that waits on the store first, what ends the beating). Every rank calls it."""
    if mesh.world_size() == 1:
        return mesh.gather_objects, lambda: None
    store = dist.distributed_c10d._get_default_store()
    attendance = Attendance(store, rank=mesh.rank(), world_size=mesh.world_size())

    def gather(values: Sequence[Any]) -> list[Any]:
        attendance.wait()
        return mesh.gather_objects(values)

    return gather, attendance.close
