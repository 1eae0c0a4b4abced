"""What sandboxes did reaches the metrics of a step: differences since the last one, summed over ranks."""

from __future__ import annotations

from collections import Counter

import pytest

from swe_rl.metrics import NAME
from swe_rl.rollout import CollectorStats
from swe_rl.rollout.statistics import Losses, rollout_metrics, rollout_sums, total


class Source:
    """The part of a Collector that is read."""

    def __init__(self) -> None:
        self.stats = CollectorStats()
        self.retried = 0
        self.counts: Counter[str] = Counter()

    def sandbox_counts(self) -> Counter[str]:
        return Counter(self.counts)


def test_counts_are_of_the_step_and_of_all_ranks() -> None:
    sources = [Source(), Source()]
    losses = [Losses(source) for source in sources]  # type: ignore[arg-type]
    for source in sources:
        source.counts.update({"leases": 4, "warm_leases": 1, "outcome_ok": 9, "local_exec_ms/4": 8, "reaped": 2})
    first = [item.since_last() for item in losses]
    sources[1].counts.update({"leases": 1, "local_exec_ms/8": 2, "wait_agents_memory_bytes_s": 0.5})  # type: ignore[dict-item]
    second = [item.since_last() for item in losses]
    found = rollout_metrics(total(rollout_sums([], counts) for counts in first))
    assert found["sandbox/leases"] == 8
    assert found["sandbox/warm_share"] == 0.25
    assert found["sandbox/outcome_ok"] == 18
    assert found["sandbox/reaped"] == 4
    assert found["sandbox/local_exec_ms_p50"] == pytest.approx(2.5)  # the bucket from 2 to 3 ms
    again = rollout_metrics(total(rollout_sums([], counts) for counts in second))
    assert again["sandbox/leases"] == 1
    assert again["sandbox/local_exec_ms_p95"] == pytest.approx(9 * 4 / 3, rel=0.2)
    assert again["sandbox/wait_agents_memory_bytes_s"] == 0.5
    assert all(NAME.fullmatch(name) for name in {**found, **again})
