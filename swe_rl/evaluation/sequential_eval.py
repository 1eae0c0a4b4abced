"""Evaluation with a stopping rule: a task is sampled until the verifier is confident, then one rollout is handed in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from swe_rl.errors import SweRlError
from swe_rl.evaluation.attempt import Attempt, attempt_of
from swe_rl.evaluation.benchmark import EvalResult
from swe_rl.evaluation.budget import until_confident
from swe_rl.protocols import Verifier
from swe_rl.rollout.collector import Collector, Drained
from swe_rl.types import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential:
    """What was handed in, and what it took."""

    result: EvalResult  # one attempt per task: the rollout that was handed in
    scores: dict[str, float]  # trajectory id -> score, of every rollout
    rollouts: float  # per task, mean
    tokens: float  # sampled per task, mean, over all its rollouts
    confident: float  # share of tasks that stopped because a score reached the threshold


async def evaluate_sequentially(
    collector: Collector,
    tasks: Sequence[Task],
    verifier: Verifier,
    *,
    split: str,
    name: str,
    threshold: float,
    most: int,
    temperature: float = 1.0,
) -> Sequential | None:
    """`most` rollouts per task at most; without a confident one the best score counts. None after `collector.drain`.

    Tasks run side by side, the rollouts of one after another. A task of which the machine lost everything is counted in
    `num_lost`. Raises SweRlError when that was so for all: nothing was measured.
    """

    async def one(task: Task) -> tuple[Task, list[Trajectory], list[float]]:
        options = {"threshold": threshold, "most": most, "phase": name}
        return task, *await until_confident(collector, task, verifier, temperature=temperature, **options)  # type: ignore[arg-type]

    running: list[asyncio.Task[tuple[Task, list[Trajectory], list[float]]]] = []
    try:
        async with asyncio.TaskGroup() as group:
            running += [group.create_task(one(task)) for task in tasks]
    except* Drained:
        running = []
    if tasks and not running:
        return None
    attempts: list[Attempt] = []
    scores: dict[str, float] = {}
    rollouts, tokens, confident = [], [], []
    for task, found, given in (item.result() for item in running):
        if not found:
            continue
        scores |= {t.trajectory_id: score for t, score in zip(found, given, strict=True)}
        best = max(range(len(found)), key=lambda i: (rank(given[i]), -i))
        attempts.append(attempt_of(found[best], task))
        rollouts.append(len(found))
        tokens.append(sum(t.num_sampled_tokens for t in found))
        confident.append(given[best] >= threshold)
    if tasks and not attempts:
        why = f", the last to {collector.stats.last_loss}" if collector.stats.last_loss else ""
        raise SweRlError(f"evaluation {name}: all rollouts of {len(tasks)} tasks were lost to the machine{why}")
    return Sequential(
        result=EvalResult(split=split, mode="sequential", attempts=attempts, num_lost=len(tasks) - len(attempts)),
        scores=scores,
        rollouts=fmean(rollouts) if rollouts else 0.0,
        tokens=fmean(tokens) if tokens else 0.0,
        confident=fmean(confident) if confident else 0.0,
    )


def rank(score: float) -> float:
    """A score to order by: what the verifier could not judge (NaN) comes last."""
    return score if score == score else -1.0
