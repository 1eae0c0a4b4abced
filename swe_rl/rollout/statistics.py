"""What the metrics say about the rollouts of a step: sums on each rank, then means of the sums over all ranks.

Names, units and reductions are in metric_table.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from swe_rl.rollout.collector import Collector
from swe_rl.sandbox.stats import sandbox_metrics
from swe_rl.types import Trajectory, TrajectoryGroup

_SANDBOX = "sandbox:"  # before the names of sandbox/stats.py
_COUNTS = (
    *("solve_none", "solve_all", "solve_partial", "uniform", "singleton", "refilled", "refill_rounds"),
    *("masked", "dropped", "unscored", "untested", "tampered", "flaky", "lost", "retried"),
)
UNTESTED = "untested"  # term of a reward that stands for a test run that was left out
VERIFIER = "verifier"  # term of a reward: what a verifier thinks of the episode, 0 to 1


def rollout_sums(groups: Sequence[TrajectoryGroup], counts: Mapping[str, float]) -> Counter[str]:
    """Sums over the trajectories of this rank; `counts` (of algorithms.assign_credit and Losses) go in as they are."""
    sums: Counter[str] = Counter()
    sums.update(counts)  # a Counter adds floats as well
    for trajectory in (t for group in groups for t in group.trajectories):
        sums["trajectories"] += 1
        sums["turns"] += len(trajectory.turns)
        sums["tokens"] += len(trajectory.token_ids)
        sums["format_errors"] += sum(turn.format_error for turn in trajectory.turns)
        sums[f"stop_reason/{trajectory.stop_reason}"] += 1
        if trajectory.reward is not None:
            sums["graded"] += 1
            sums["tampered"] += trajectory.reward.terms.get("tamper", 0.0) > 0
            sums["flaky"] += trajectory.reward.terms.get("flaky", 0.0) > 0
            sums["reward"] += trajectory.reward.value  # type: ignore[assignment]
            _add_outcome(sums, trajectory)
    return sums


def _add_outcome(sums: Counter[str], trajectory: Trajectory) -> None:
    assert trajectory.reward is not None  # the caller asks
    if UNTESTED in trajectory.reward.terms:  # says nothing about success
        sums["untested"] += 1
        return
    outcome = "passed" if trajectory.reward.solved else "failed"
    sums[outcome] += 1
    sums[f"{outcome}_turns"] += len(trajectory.turns)
    sums[f"{outcome}_tokens"] += trajectory.num_sampled_tokens
    if (score := trajectory.reward.terms.get(VERIFIER)) is not None:
        sums[f"judged_{outcome}"] += 1
        sums[f"score_{outcome}"] += score  # type: ignore[assignment]


def total(parts: Iterable[Mapping[str, float]]) -> Counter[str]:
    """The sums of all ranks as one."""
    added: Counter[str] = Counter()
    for part in parts:
        added.update(part)
    return added


def rollout_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics by name from `total` of `rollout_sums`; means of nothing are 0."""

    def ratio(value: float, over: float) -> float:
        return value / over if over else 0.0

    def mean(name: str, over: str) -> float:
        return ratio(sums.get(name, 0), sums.get(over, 0))

    metrics = {f"rollout/{name}": float(sums.get(name, 0)) for name in _COUNTS}
    metrics["rollout/reward_mean"] = mean("reward", "graded")
    metrics["rollout/success"] = ratio(sums.get("passed", 0), sums.get("passed", 0) + sums.get("failed", 0))
    metrics["rollout/num_turns_mean"] = mean("turns", "trajectories")
    metrics["rollout/num_tokens_mean"] = mean("tokens", "trajectories")
    metrics["rollout/format_error_rate"] = mean("format_errors", "turns")
    for outcome in ("passed", "failed"):
        metrics[f"rollout/num_turns_{outcome}"] = mean(f"{outcome}_turns", outcome)
        metrics[f"rollout/sampled_tokens_{outcome}"] = mean(f"{outcome}_tokens", outcome)
    if sums.get("cut"):
        metrics |= _cut_metrics(sums)
    if judged := sums.get("judged_passed", 0) + sums.get("judged_failed", 0):
        score = (sums.get("score_passed", 0) + sums.get("score_failed", 0)) / judged
        metrics |= {"verifier/score": score, "verifier/gap": score - sums.get("judged_passed", 0) / judged}
    if sums.get("judged_failed"):
        metrics["verifier/score_failed"] = mean("score_failed", "judged_failed")
    families = ("stop_reason/", "filtered_")
    found = {name: float(count) for name, count in sums.items() if name.startswith(families)}
    metrics |= {name if "/" in name else f"rollout/{name}": value for name, value in found.items()}
    return metrics | sandbox_metrics({n.removeprefix(_SANDBOX): v for n, v in sums.items() if n.startswith(_SANDBOX)})


def _cut_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """What cutting stragglers did. Their full duration is unknown: with what they had run, the bias is a bound."""
    kept, cut, kept_s, cut_s = (float(sums.get(name, 0)) for name in ("kept", "cut", "kept_s", "cut_s"))
    started_s = (kept_s + cut_s) / (kept + cut)
    return {
        "rollout/cut": float(cut),
        "rollout/cut_share": cut / (kept + cut),
        "rollout/kept_s": kept_s / kept if kept else 0.0,
        "rollout/cut_s": cut_s / cut,
        "rollout/short_bias": kept_s / kept / started_s if kept and started_s else 1.0,
    }


class Losses:
    """What the collector lost, repeated and cut, and what its sandboxes did, since the last call."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._before = self._now()

    def since_last(self) -> dict[str, float]:
        now = self._now()
        found = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = now
        return found

    def _now(self) -> dict[str, float]:
        stats = self._collector.stats
        sandboxes = {_SANDBOX + name: count for name, count in self._collector.sandbox_counts().items()}
        return {
            **sandboxes,
            "lost": stats.lost,
            "retried": self._collector.retried,
            "cut": stats.cut,
            "cut_s": stats.cut_s,
            "kept": stats.kept,
            "kept_s": stats.kept_s,
        }
