"""What the metrics say about the rollouts of a step: sums on each rank, then means of the sums over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from swe_rl.rollout.collector import Collector
from swe_rl.types import TrajectoryGroup

_COUNTS = ("solve_none", "solve_all", "solve_partial", "masked", "singleton", "lost", "retried")


def rollout_sums(groups: Sequence[TrajectoryGroup], counts: Mapping[str, int]) -> Counter[str]:
    """Sums over the trajectories of this rank; `counts` (of algorithms.filter_group and Losses) go in as they are."""
    sums: Counter[str] = Counter(counts)
    for trajectory in (t for group in groups for t in group.trajectories):
        sums["trajectories"] += 1
        sums["turns"] += len(trajectory.turns)
        sums["tokens"] += len(trajectory.token_ids)
        sums["format_errors"] += sum(turn.format_error for turn in trajectory.turns)
        sums[f"stop_reason/{trajectory.stop_reason}"] += 1
        if trajectory.reward is not None:
            sums["graded"] += 1
            sums["reward"] += trajectory.reward.value  # type: ignore[assignment]  # a Counter adds floats as well
            sums["passed"] += trajectory.reward.solved
    return sums


def total(parts: Iterable[Mapping[str, float]]) -> Counter[str]:
    """The sums of all ranks as one."""
    added: Counter[str] = Counter()
    for part in parts:
        added.update(part)
    return added


def rollout_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics by name from `total` of `rollout_sums`; means of nothing are 0."""

    def mean(name: str, over: str) -> float:
        return sums.get(name, 0) / max(1, sums.get(over, 0))

    metrics = {f"rollout/{name}": float(sums.get(name, 0)) for name in _COUNTS}
    metrics["rollout/reward_mean"] = mean("reward", "graded")
    metrics["rollout/success"] = mean("passed", "graded")
    metrics["rollout/num_turns_mean"] = mean("turns", "trajectories")
    metrics["rollout/num_tokens_mean"] = mean("tokens", "trajectories")
    metrics["rollout/format_error_rate"] = mean("format_errors", "turns")
    return metrics | {name: float(count) for name, count in sums.items() if name.startswith("stop_reason/")}


class Losses:
    """Rollouts lost and attempts repeated for trouble of the machine, since the last call."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._lost, self._retried = collector.stats.lost, collector.retried

    def since_last(self) -> dict[str, int]:
        lost, retried = self._collector.stats.lost, self._collector.retried
        found = {"lost": lost - self._lost, "retried": retried - self._retried}
        self._lost, self._retried = lost, retried
        return found
