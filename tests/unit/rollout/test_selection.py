"""Which rollouts are imitated, and which tasks the next phase trains on."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swe_rl.config import PhaseConfig
from swe_rl.rollout.journal import Journal, RolloutKey
from swe_rl.rollout.pool import Tally, measured_success, merged, next_pool
from swe_rl.rollout.selection import select_passed
from swe_rl.sample_streams import Share, phase_pool
from swe_rl.tasks import load_tasks
from swe_rl.types import Completion, Reward, StopReason, Trajectory, Turn


def attempt(
    task: str, index: int, *, ids: tuple[int, ...] = (1,), reward: float | None = 1.0, patch: bytes = b"p", bad: int = 0
) -> Trajectory:
    completion = Completion(
        token_ids=list(ids),
        rollout_logprobs=[-1.0] * len(ids),
        finish_reason="stop",
        policy_version=0,
        policy_version_max=0,
    )
    turns = [
        Turn(context_ids=[7], completion=completion, tool_call=None, observation="", format_error=n < bad)
        for n in range(2)
    ]
    return Trajectory(
        trajectory_id=f"rl/0/{task}/{index}",
        task_id=task,
        group_id=f"rl/0/{task}",
        rollout_index=index,
        turns=turns,
        stop_reason=StopReason.INFRA_ERROR if reward is None else StopReason.SUBMITTED,
        temperature=1.0,
        patch=patch,
        reward=None if reward is None else Reward(value=reward),
    )


ATTEMPTS = [
    attempt("a", 0, ids=(1, 2), patch=b"x", bad=1),
    attempt("a", 1, ids=(1, 2), patch=b"x"),  # the same ids as the first
    attempt("a", 2, ids=(3,), patch=b"x"),  # another way to the same patch
    attempt("a", 3, ids=(4,), patch=b"y"),
    attempt("a", 4, ids=(5,), patch=b"z", reward=0.0),
    attempt("b", 0, ids=(1, 2), patch=b"x"),  # another task: no duplicate
    attempt("b", 1, ids=(6,), reward=None),
]


@pytest.mark.parametrize(
    ("settings", "kept", "counts"),
    [
        ({}, ["a/0", "a/1", "a/2", "a/3", "b/0"], (0, 0, 1)),
        ({"dedupe": "sampled"}, ["a/0", "a/2", "a/3", "b/0"], (1, 0, 1)),
        ({"dedupe": "patch"}, ["a/0", "a/3", "b/0"], (2, 0, 1)),
        ({"max_per_task": 2}, ["a/0", "a/1", "b/0"], (0, 2, 1)),
        ({"dedupe": "sampled", "max_per_task": 2}, ["a/0", "a/2", "b/0"], (1, 1, 1)),
    ],
)
def test_passed_once_and_not_too_many(settings: dict[str, Any], kept: list[str], counts: tuple[int, int, int]) -> None:
    chosen, metrics = select_passed(ATTEMPTS, **settings)
    assert [t.trajectory_id.removeprefix("rl/0/") for t in chosen] == kept
    names = ("rft/num_duplicates", "rft/num_over_cap", "rft/num_masked_turns")
    assert tuple(metrics[name] for name in names) == counts
    assert (metrics["rollout/num_trajectories"], metrics["rollout/num_passed"]) == (7, 5)
    assert (metrics["rft/num_kept"], metrics["rft/num_tasks_kept"]) == (len(kept), 2)


def test_nothing_passed_is_nothing_kept() -> None:
    chosen, metrics = select_passed([attempt("a", 0, reward=0.0)], dedupe="sampled", max_per_task=1)
    assert chosen == []
    assert metrics["rft/num_kept"] == 0


def test_success_is_read_back_from_both_forms_of_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in range(2):
        for item in ATTEMPTS:
            journal.append(RolloutKey("rl", step, item.task_id, item.rollout_index), item)
    journal.append(RolloutKey("rl-2", 0, "a", 0), ATTEMPTS[4])  # a phase whose name begins the same
    journal.compact("rl", 0)
    assert measured_success(tmp_path, "rl") == {"a": Tally(passed=8, graded=10), "b": Tally(passed=2, graded=2)}
    assert measured_success(tmp_path, "rl-2") == {"a": Tally(passed=0, graded=1)}
    assert measured_success(tmp_path, "rft") == {}
    journal.close()


def test_a_rollout_that_nobody_tested_says_nothing_about_its_task(tmp_path: Path) -> None:
    """run_tests_on_filtered=false: reward 0 is a convention of the baseline, not a failure that was measured."""
    untested = replace(attempt("a", 0), reward=Reward(value=0.0, terms={"untested": 1.0}))
    for compact in (False, True):
        with closing(Journal(tmp_path / str(compact))) as journal:
            for index, item in enumerate((untested, attempt("a", 1), replace(untested, task_id="b"))):
                journal.append(RolloutKey("rl", 0, item.task_id, index), item)
            if compact:
                journal.compact("rl", 0)
        measured = measured_success(tmp_path / str(compact), "rl")
        assert measured == {"a": Tally(passed=1, graded=1)}, "task b was not tried: it stays in the next pool"


def test_the_next_pool_leaves_out_what_is_solved_often_and_never() -> None:
    tasks = load_tasks("minirepo", split="train", num_tasks=6, seed=0)
    tallies = [(0, 10), (1, 10), (6, 10), (2, 3), (10, 10)]
    measured = {t.task_id: Tally(passed=p, graded=g) for t, (p, g) in zip(tasks, tallies, strict=False)}
    assert next_pool(tasks, measured, max_success=2 / 3) == [tasks[1], tasks[2], tasks[5]]
    assert next_pool(tasks, measured, max_success=1.0) == [tasks[1], tasks[2], tasks[3], tasks[5]]


def test_ranks_measure_together() -> None:
    parts = [{"a": Tally(passed=1, graded=2)}, {"a": Tally(passed=0, graded=3), "b": Tally(passed=1, graded=1)}]
    assert merged(parts) == {"a": Tally(passed=1, graded=5), "b": Tally(passed=1, graded=1)}


async def test_the_pool_of_a_phase(tmp_path: Path) -> None:
    tasks = load_tasks("minirepo", split="train", num_tasks=3, seed=0)
    journal = Journal(tmp_path)
    for task, rewards in zip(tasks, [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0)], strict=True):
        for index, reward in enumerate(rewards):
            item = attempt(task.task_id, index, reward=reward)
            journal.append(RolloutKey("rl", 0, task.task_id, index), item)
    journal.close()
    phase = PhaseConfig(name="more", steps=1, pool_from="rl")
    pool, why = await phase_pool(tasks, phase, tmp_path, share=Share())
    assert pool == tasks[:1]
    assert why == "3 of 3 tasks tried in phase rl, 1 of them never solved: 1 tasks are left"
    assert await phase_pool(tasks, PhaseConfig(name="more", steps=1), tmp_path, share=Share()) == (tasks, "")
    none_left = PhaseConfig(name="more", steps=1, pool_from="rl", max_success=0.5)
    pool, why = await phase_pool(tasks, none_left, tmp_path, share=Share())
    assert pool == tasks
    assert why.endswith("only 0 would be left, so all stay")
