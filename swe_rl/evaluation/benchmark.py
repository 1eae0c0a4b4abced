"""Runs a set of tasks and reports the success rate with its standard error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from swe_rl.errors import SweRlError
from swe_rl.evaluation.statistics import clustered_mean, pass_at_k
from swe_rl.rollout.collector import Collector
from swe_rl.types import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a result needs of one rollout; small, so that ranks can exchange it."""

    task_id: str
    kind: str
    passed: bool
    stop_reason: str
    num_turns: int
    num_sampled_tokens: int
    num_format_errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Attempts on one split in one mode. Rollouts lost to the machine are in none of the numbers but `num_lost`."""

    split: str
    mode: str  # "sampled", "greedy", ...
    attempts: Sequence[Attempt] = field(repr=False)
    num_lost: int = 0

    @property
    def by_task(self) -> dict[str, list[float]]:
        """1.0 or 0.0 per attempt, by task id."""
        found: dict[str, list[float]] = {}
        for attempt in self.attempts:
            found.setdefault(attempt.task_id, []).append(float(attempt.passed))
        return found

    @property
    def num_tasks(self) -> int:
        return len(self.by_task)

    @property
    def success(self) -> float:
        """pass@1: mean over attempts; nan without any."""
        return clustered_mean(self.by_task)[0]

    @property
    def stderr(self) -> float:
        """Standard error of `success`, clustered by task; nan below two tasks."""
        return clustered_mean(self.by_task)[1]

    def pass_at(self, k: int) -> tuple[float, float]:
        """(pass@k, its standard error) over the tasks with at least k attempts."""
        rates = {
            task: [pass_at_k(len(values), int(sum(values)), k)]
            for task, values in self.by_task.items()
            if len(values) >= k
        }
        return clustered_mean(rates)

    def by_kind(self) -> dict[str, tuple[float, float]]:
        """(pass@1, standard error) per kind of task."""
        kinds = sorted({attempt.kind for attempt in self.attempts})
        parts = {kind: [attempt for attempt in self.attempts if attempt.kind == kind] for kind in kinds}
        found = {}
        for kind, attempts in parts.items():
            part = EvalResult(split=self.split, mode=self.mode, attempts=attempts)
            found[kind] = (part.success, part.stderr)
        return found

    def as_row(self) -> dict[str, Any]:
        """JSON-able summary; `by_task` allows paired comparisons later."""
        attempts = self.attempts
        return {
            "split": self.split,
            "mode": self.mode,
            "success": self.success,
            "stderr": self.stderr,
            "num_tasks": self.num_tasks,
            "num_samples": len(attempts),
            "num_lost": self.num_lost,
            "mean_turns": fmean(a.num_turns for a in attempts) if attempts else 0.0,
            "mean_sampled_tokens": fmean(a.num_sampled_tokens for a in attempts) if attempts else 0.0,
            "format_errors_per_turn": sum(a.num_format_errors for a in attempts)
            / max(1, sum(a.num_turns for a in attempts)),
            "stop_reasons": dict(Counter(a.stop_reason for a in attempts)),
            "by_kind": {kind: list(value) for kind, value in self.by_kind().items()},
            "by_task": self.by_task,
        }


async def evaluate(
    collector: Collector,
    tasks: Sequence[Task],
    *,
    split: str,
    mode: str = "sampled",
    name: str,
    samples_per_task: int = 1,
    temperature: float = 1.0,
    step: int = 0,
    gather: Callable[[list[Any]], list[Any]] = list,
) -> EvalResult:
    """`samples_per_task` attempts on each task; temperature 0 is greedy. `name` is the phase of the rollout keys, so
    seeds and the journal follow it. `gather` concatenates lists over ranks; each rank brings its own part of the tasks.

    After `collector.drain` the result holds what was finished. Raises SweRlError, on every rank, when all attempts were
    lost to the machine: nothing was measured.
    """
    attempts: list[Attempt] = []
    lost = 0
    groups = collector.groups(
        tasks, group_size=samples_per_task, phase=name, step=step, temperature=temperature, ordered=True
    )
    kinds = {task.task_id: task.kind for task in tasks}
    async with aclosing(groups):
        async for group in groups:
            attempts += [_attempt(item, kinds[group.task_id]) for item in group.trajectories]
            lost += samples_per_task - len(group.trajectories)
    found: list[tuple[list[Attempt], int]] = gather([(attempts, lost)])
    all_attempts = [attempt for part, _ in found for attempt in part]
    num_lost = sum(count for _, count in found)
    if num_lost and not all_attempts:
        why = f", the last to {collector.stats.last_loss}" if collector.stats.last_loss else ""
        raise SweRlError(f"evaluation {name}: all {num_lost} attempts were lost to the machine{why}")
    return EvalResult(split=split, mode=mode, attempts=all_attempts, num_lost=num_lost)


def is_resolved(trajectory: Trajectory) -> bool:
    """All required hidden tests passed."""
    return trajectory.reward is not None and trajectory.reward.solved


def _attempt(trajectory: Trajectory, kind: str) -> Attempt:
    return Attempt(
        task_id=trajectory.task_id,
        kind=kind,
        passed=is_resolved(trajectory),
        stop_reason=str(trajectory.stop_reason),
        num_turns=len(trajectory.turns),
        num_sampled_tokens=trajectory.num_sampled_tokens,
        num_format_errors=sum(turn.format_error for turn in trajectory.turns),
    )
