"""From attempts to the execution-based fields of their candidates: which tests there are, and what each says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from swe_rl.config import SandboxConfig
from swe_rl.errors import SandboxError
from swe_rl.evaluation.equivalence import patch_digest
from swe_rl.evaluation.execution_bench import ExecutionBench, Outcomes
from swe_rl.evaluation.execution_tests import WrittenTest, quality_of, without_duplicates
from swe_rl.rollout.wiring import GradingLane, Pool, sandbox_spec
from swe_rl.types import SandboxSpec, Task, Trajectory

A = TypeVar("A")
R = TypeVar("R")


def bench_of(cfg: SandboxConfig, *, pool: Pool, trees: Path, limit_s: float) -> ExecutionBench:
    """A bench on sandboxes as configured, in the lane of grading."""

    async def spec_of(task: Task) -> SandboxSpec:
        try:
            return await asyncio.to_thread(partial(sandbox_spec, task, cfg, trees=trees))
        except OSError as err:  # disk full and the like: the machine's failure
            raise SandboxError(f"the tree of task {task.task_id} could not be written: {err}") from err

    return ExecutionBench(spec_of=spec_of, lease=GradingLane(pool).lease, limit_s=limit_s, retries=cfg.infra_retries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """What running all tests on all candidates gave."""

    changes: Mapping[str, Mapping[str, Any]]  # trajectory id -> fields of its candidate
    tests: Sequence[WrittenTest]  # with their final states
    outcomes: Mapping[str, Mapping[str, str]] = field(repr=False)  # trajectory id -> valid test -> outcome
    num_regression: Mapping[str, int]  # existing tests by task
    num_runs: int  # sandboxes' worth: equivalent patches of a task are run once

    def summary(self, passed: Mapping[str, bool | None]) -> str:
        """Two lines for people; `passed` (by the hidden tests, by trajectory id) is for the quality of tests alone."""
        solved = {name: value for name, value in passed.items() if value is not None}
        quality = quality_of(self.tests, self.outcomes, solved)
        states = ", ".join(f"{state} {count}" for state, count in quality.states.items()) or "none"
        share = partial(_share, of=quality.judged)
        return (
            f"existing tests: {sum(self.num_regression.values())} in {sum(map(bool, self.num_regression.values()))} of "
            f"{len(self.num_regression)} tasks; {self.num_runs} different patches run\n"
            f"written tests: {len(self.tests)} ({states}); of {quality.judged} valid ones where right and wrong "
            f"attempts are known: toxic {share(quality.toxic)}, distinguishing {share(quality.distinguishing)}"
        )


async def execute(
    bench: ExecutionBench,
    trajectories: Sequence[Trajectory],
    tasks: Mapping[str, Task],
    tests: Sequence[WrittenTest],
    *,
    regression: bool,
    concurrency: int,
    on_run: Callable[[], None] = lambda: None,
) -> Executed:
    """Runs the existing (where `regression`) and the valid written tests of each task on each candidate patch.

    Keyed by trajectory: several attempts at one task, in whatever order, never share or swap results. Equivalent
    patches of a task are run once. Of tests that behave alike one counts. Raises SandboxError when the machine lets
    some run come to nothing in all its retries.
    """
    ids = sorted({item.task_id for item in trajectories})
    existing: dict[str, list[str]] = {name: [] for name in ids}
    if regression:
        found = await _all(ids, lambda name: bench.regression_tests(tasks[name]), concurrency)
        existing = dict(zip(ids, found, strict=True))
    valid = {name: [test for test in tests if test.task_id == name and test.valid] for name in ids}
    jobs = {(t.task_id, patch_digest(t.patch or b"", base=tasks[t.task_id].tree)): t.patch or b"" for t in trajectories}

    async def run(job: tuple[str, str]) -> Outcomes:
        name = job[0]
        done = await bench.run(tasks[name], jobs[job], regression=existing[name], tests=valid[name])
        on_run()
        return done

    results = dict(zip(jobs, await _all(list(jobs), run, concurrency), strict=True))
    by_attempt = {
        t.trajectory_id: results[t.task_id, patch_digest(t.patch or b"", base=tasks[t.task_id].tree)]
        for t in trajectories
    }
    final: list[WrittenTest] = [test for test in tests if test.task_id not in valid]
    for name in ids:
        own = [test for test in tests if test.task_id == name]
        members = {t.trajectory_id: by_attempt[t.trajectory_id].reproduction for t in trajectories if t.task_id == name}
        final += without_duplicates(own, members)
    kept = {test.test_id for test in final if test.valid}
    changes: dict[str, dict[str, Any]] = {}
    for name, outcome in by_attempt.items():
        changes[name] = {"reproduction": {k: v for k, v in outcome.reproduction.items() if k in kept}} if tests else {}
        if regression:
            changes[name]["regression"] = dict(outcome.regression)
    return Executed(
        changes=changes,
        tests=final,
        outcomes={name: outcome.reproduction for name, outcome in by_attempt.items()},
        num_regression={name: len(found) for name, found in existing.items()} if regression else {},
        num_runs=len(jobs),
    )


async def _all(items: Sequence[A], work: Callable[[A], Awaitable[R]], concurrency: int) -> list[R]:
    """Results in the order of `items`, at most `concurrency` at a time; the first failure cancels the rest."""
    places = asyncio.Semaphore(concurrency)

    async def one(item: A) -> R:
        async with places:
            return await work(item)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(item)) for item in items]
    return [task.result() for task in tasks]


def _share(count: int, *, of: int) -> str:
    return f"{count}/{of}" + (f" ({100 * count / of:.0f} %)" if of else "")
