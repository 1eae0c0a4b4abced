"""Results go by trajectory: whatever finishes first, however many attempts a task has, whatever patch they share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from swe_rl.errors import SandboxError
from swe_rl.evaluation.candidates import candidate_of, read_candidates, update_candidates, write_candidates
from swe_rl.evaluation.execution_bench import Outcomes
from swe_rl.evaluation.execution_scores import execute
from swe_rl.evaluation.execution_tests import WrittenTest
from swe_rl.evaluation.selection import SELECTORS, select_one
from swe_rl.tasks import tree_diff
from swe_rl.testing import make_task
from swe_rl.types import Task, Trajectory
from tests.unit.evaluation.attempts import attempt

TASKS = {name: make_task(name) for name in ("a", "b")}
BASE = {"calc.py": TASKS["a"].tree["calc.py"]}


def patch(body: str) -> bytes:
    return tree_diff(BASE, {"calc.py": f"def add(a, b):\n    return {body}\n".encode()})


PATCHES = [patch("a + b"), patch("a * b"), patch("a + b"), b"", patch("a +  b  # the same")]


@dataclass
class Bench:
    """Passes what adds; answers in a random order."""

    rng: random.Random
    runs: list[tuple[str, bytes]] = field(default_factory=list)
    broken: str = ""

    async def regression_tests(self, task: Task) -> list[str]:
        await asyncio.sleep(self.rng.random() / 200)
        return [f"{task.task_id}::old"]

    async def run(
        self, task: Task, patch: bytes, *, regression: Sequence[str], tests: Sequence[WrittenTest]
    ) -> Outcomes:
        await asyncio.sleep(self.rng.random() / 200)
        self.runs.append((task.task_id, patch))
        if task.task_id == self.broken:
            raise SandboxError("lost")
        adds = b"a + b" in patch or b"a +  b" in patch
        written = {test.test_id: "resolved" if adds or "easy" in test.test_id else "reproduced" for test in tests}
        return Outcomes(regression=dict.fromkeys(regression, "passed" if patch else "failed"), reproduction=written)


def attempts() -> list[Trajectory]:
    return [
        attempt(TASKS[name], index=i, patch=body, solved=b"+ b" in body or b"+  b" in body)
        for name in TASKS
        for i, body in enumerate(PATCHES)
    ]


def some_tests() -> list[WrittenTest]:
    names = ("t1", "t2-like-t1", "easy", "no")
    states = {"no": "no_test"}
    return [
        WrittenTest(test_id=f"{task}/{name}", task_id=task, state=states.get(name, "valid"))
        for task in TASKS
        for name in names
    ]


@pytest.mark.parametrize("seed", range(4))
async def test_neither_the_order_of_attempts_nor_of_completion_changes_a_score(seed: int) -> None:
    rng = random.Random(seed)
    bench, given = Bench(rng), rng.sample(attempts(), len(attempts()))
    found = await execute(bench, given, TASKS, some_tests(), regression=True, concurrency=3)  # type: ignore[arg-type]
    for item in attempts():
        name, adds = item.task_id, item.rollout_index in (0, 2, 4)
        assert found.changes[item.trajectory_id] == {
            "regression": {f"{name}::old": "failed" if item.rollout_index == 3 else "passed"},
            "reproduction": {f"{name}/t1": "resolved" if adds else "reproduced", f"{name}/easy": "resolved"},
        }
    assert len(bench.runs) == len(set(bench.runs)) == found.num_runs == 6  # three answers per task, five attempts
    assert {test.test_id: test.state for test in found.tests if test.task_id == "a"} == {
        "a/t1": "valid",
        "a/t2-like-t1": "duplicate",
        "a/easy": "valid",
        "a/no": "no_test",
    }


async def test_what_the_machine_lost_is_raised_and_not_scored() -> None:
    bench = Bench(random.Random(0), broken="b")
    with pytest.raises(ExceptionGroup) as err:
        await execute(bench, attempts(), TASKS, some_tests(), regression=True, concurrency=2)  # type: ignore[arg-type]
    assert err.group_contains(SandboxError, match="lost")


async def test_the_candidates_of_a_run_are_filled_and_selected_from(tmp_path) -> None:  # type: ignore[no-untyped-def]
    given = attempts()
    write_candidates(tmp_path / "candidates.jsonl", [candidate_of(t, TASKS[t.task_id]) for t in given])
    found = await execute(Bench(random.Random(0)), given[::-1], TASKS, some_tests(), regression=True, concurrency=4)  # type: ignore[arg-type]
    update_candidates(tmp_path, found.changes)
    update_candidates(tmp_path, {t.trajectory_id: {"ef_score": 0.5} for t in given})
    for name in TASKS:
        own = [item for item in read_candidates(tmp_path) if item.task_id == name]
        for selector in ("hybrid", "eb"):
            assert select_one(SELECTORS[selector], own).passed
            assert select_one(SELECTORS[selector], own[:1]).trajectory_id == own[0].trajectory_id  # k = 1
    text = found.summary({t.trajectory_id: t.reward.solved if t.reward else None for t in given})
    assert "existing tests: 2 in 2 of 2 tasks; 6 different patches run" in text
    assert "toxic 0/4 (0 %), distinguishing 2/4 (50 %)" in text


async def test_without_tests_only_the_existing_ones_are_filled() -> None:
    found = await execute(Bench(random.Random(0)), attempts(), TASKS, [], regression=True, concurrency=4)  # type: ignore[arg-type]
    assert all(set(fields) == {"regression"} for fields in found.changes.values())
    found = await execute(Bench(random.Random(0)), attempts(), TASKS, some_tests(), regression=False, concurrency=4)  # type: ignore[arg-type]
    assert all(set(fields) == {"reproduction"} for fields in found.changes.values())
