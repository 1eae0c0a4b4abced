"""Ranks wait for late ones as long as these give signs of life, and name one that does not."""

from __future__ import annotations

import threading
import time

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


def test_a_single_process_waits_for_nobody() -> None:
    gather, close = open_attendance()
    assert gather is mesh.gather_objects
    close()
