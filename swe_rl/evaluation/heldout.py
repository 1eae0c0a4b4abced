"""The held-out evaluation of a policy in training: each split sampled at temperature 1, and a part of it greedily."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from swe_rl.config import EvalConfig
from swe_rl.evaluation.benchmark import EvalResult, evaluate
from swe_rl.rollout.collector import Collector
from swe_rl.types import Task


async def evaluate_splits(
    collector: Collector,
    splits: Mapping[str, Sequence[Task]],
    cfg: EvalConfig,
    *,
    name: str,
    limit: int = 0,
    temperature: float = 1.0,
    own_part: Callable[[Sequence[Task]], list[Task]] = list,
    gather: Callable[[list[Any]], list[Any]] = list,
    begin: Callable[[str, int], None] = lambda label, rollouts: None,
    interrupted: Callable[[], Awaitable[bool]],
) -> list[EvalResult] | None:
    """One result per split and mode, of at most `limit` tasks (0: all); None when interrupted on the way. `temperature`
    is that of the mode "sampled".

    `own_part` picks this rank's tasks, `gather` concatenates lists over ranks, `begin` hears a label and the number of
    rollouts before each part. `interrupted` must answer the same on every rank. Collective under torchrun.
    """
    results: list[EvalResult] = []
    for split, tasks in splits.items():
        chosen = tasks[: limit or len(tasks)]
        for mode, heat, count, samples in (
            ("sampled", temperature, len(chosen), cfg.samples_per_task),
            ("greedy", 0.0, cfg.greedy_tasks, 1),
        ):
            if not count:
                continue
            if await interrupted():
                return None
            own = own_part(chosen[:count])
            begin(f"{name} on {split}, {mode}", len(own) * samples)
            result = await evaluate(
                collector,
                own,
                split=split,
                mode=mode,
                name=f"eval-{name}-{split}-{mode}",
                samples_per_task=samples,
                temperature=heat,
                gather=gather,
            )
            results.append(result)
    return None if await interrupted() else results
