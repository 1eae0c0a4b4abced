"""Ranks wait for late ones as long as these give signs of life, and name one that does not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from swe_rl.errors import InvariantError
from swe_rl.training import mesh
from swe_rl.training.waiting import Attendance, open_attendance


def ranks(count: int, *, silence_s: float) -> list[Attendance]:
    store = dist.HashStore()
    return [Attendance(store, rank=r, world_size=count, beat_s=0.05, silence_s=silence_s) for r in range(count)]


def test_a_late_rank_is_waited_for_longer_than_silence_may_last() -> None:
    early, late = ranks(2, silence_s=0.5)
    met: list[int] = []

    def meet(attendance: Attendance, number: int) -> None:
        for _ in range(3):
            attendance.wait()
        met.append(number)

    first = threading.Thread(target=meet, args=(early, 0))
    first.start()
    time.sleep(1.5)  # three times as long as silence may last
    assert not met
    meet(late, 1)
    first.join(timeout=20)
    assert sorted(met) == [0, 1]
    early.close()
    late.close()


def test_a_rank_that_is_gone_is_named() -> None:
    here, gone, other = ranks(3, silence_s=0.5)
    gone.close()
    with pytest.raises(InvariantError, match="rank 1 has given no sign of life for"):
        here.wait()
    here.close()
    other.close()


class Failing(dist.Store):  # type: ignore[misc]  # torch gives it no type
    """A store whose calls number `first` to `last` fail; those of all ranks are counted."""

    def __init__(self, *, first: int, last: float) -> None:
        super().__init__()
        self.values: dict[str, int] = {}
        self.calls, self.first, self.last = 0, first, last
        self.lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.calls += 1
            if self.first <= self.calls <= self.last:
                raise dist.DistNetworkError("connection reset by peer")
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_store_that_fails_twice_ends_no_beat() -> None:
    store = Failing(first=3, last=4)
    attendance = Attendance(store, rank=0, world_size=1, beat_s=0.01, silence_s=30)
    until(lambda: store.calls >= 8)
    attendance.close()
    assert sum(store.values.values()) == store.calls - 2, "every other call was a beat that counts"


def test_a_store_that_is_gone_for_long_ends_the_beat(caplog: pytest.LogCaptureFixture) -> None:
    store = Failing(first=2, last=float("inf"))
    with caplog.at_level(logging.WARNING):
        Attendance(store, rank=0, world_size=1, beat_s=0.01, silence_s=0.2)
        until(lambda: bool(caplog.messages))
    assert "rank 0 beats no more: the store refused for 0 s: connection reset by peer" in caplog.messages
    beats = store.calls
    time.sleep(0.1)
    assert store.calls == beats


def test_a_single_process_waits_for_nobody() -> None:
    gather, close = open_attendance()
    assert gather is mesh.gather_objects
    close()
