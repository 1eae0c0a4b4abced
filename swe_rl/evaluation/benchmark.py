"""Runs a set of tasks and reports the success rate with its standard error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from swe_rl.errors import SweRlError
from swe_rl.evaluation.attempt import Attempt, attempt_of
from swe_rl.evaluation.statistics import clustered_mean, mean_of_runs, pass_at_k, rate_interval
from swe_rl.rollout.collector import Collector
from swe_rl.types import Task

COSTS = ("num_turns", "num_commands", "num_sampled_tokens", "num_tokens", "seconds")  # of Attempt, reported as means


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

    @property
    def run_means(self) -> list[float]:
        """Success of each run: the first attempts at all tasks, the second ones, and so on, as long as no task lacks
        one."""
        shortest = min((len(values) for values in self.by_task.values()), default=0)
        return [fmean(values[run] for values in self.by_task.values()) for run in range(shortest)]

    def pass_at(self, k: int) -> tuple[float, float]:
        """(pass@k, its standard error) over the tasks with at least k attempts."""
        rates = {
            task: [pass_at_k(len(values), int(sum(values)), k)]
            for task, values in self.by_task.items()
            if len(values) >= k
        }
        return clustered_mean(rates)

    def curve(self) -> dict[int, tuple[float, float, float]]:
        """k -> (pass@k, low, high) with 95 % intervals over tasks, for the powers of two and the number of attempts
        that every task has."""
        most = min((len(values) for values in self.by_task.values()), default=0)
        found = {}
        for k in sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most} - {0}):
            rate, error = self.pass_at(k)
            found[k] = (rate, *rate_interval(rate, error, self.num_tasks))
        return found

    def parts(self, key: str) -> dict[str, EvalResult]:
        """The results of the attempts that agree in a field of Attempt: kind, repository, difficulty."""
        found: dict[str, list[Attempt]] = {}
        for attempt in self.attempts:
            found.setdefault(getattr(attempt, key), []).append(attempt)
        return {
            name: EvalResult(split=self.split, mode=self.mode, attempts=found[name]) for name in sorted(found) if name
        }

    def by_kind(self) -> dict[str, tuple[float, float]]:
        """(pass@1, standard error) per kind of task."""
        return {name: (part.success, part.stderr) for name, part in self.parts("kind").items()}

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

    def as_report(self) -> dict[str, Any]:
        """`as_row` with all that `swe-rl eval` tells: intervals, runs, pass@k, costs, outcomes and parts."""
        row = self.as_row()
        row["interval"] = list(rate_interval(self.success, self.stderr, self.num_tasks))
        row["run_means"] = self.run_means
        row["run_stderr"] = mean_of_runs(self.run_means)[1]
        row["pass_at"] = {str(k): list(values) for k, values in self.curve().items()}
        row["cost"] = {key: fmean(getattr(a, key) for a in self.attempts) if self.attempts else 0.0 for key in COSTS}
        row["outcomes"] = dict(Counter(attempt.outcome for attempt in self.attempts))
        for key in ("repository", "difficulty", "kind"):
            row[f"by_{key}"] = {
                name: [part.success, part.stderr, part.num_tasks] for name, part in self.parts(key).items()
            }
        return row


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
    by_id = {task.task_id: task for task in tasks}
    async with aclosing(groups):
        async for group in groups:
            task = by_id[group.task_id]
            attempts += [attempt_of(item, task, run=run) for run, item in enumerate(group.trajectories)]
            lost += samples_per_task - len(group.trajectories)
    found: list[tuple[list[Attempt], int]] = gather([(attempts, lost)])
    all_attempts = [attempt for part, _ in found for attempt in part]
    num_lost = sum(count for _, count in found)
    if num_lost and not all_attempts:
        why = f", the last to {collector.stats.last_loss}" if collector.stats.last_loss else ""
        raise SweRlError(f"evaluation {name}: all {num_lost} attempts were lost to the machine{why}")
    return EvalResult(split=split, mode=mode, attempts=all_attempts, num_lost=num_lost)
