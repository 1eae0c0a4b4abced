"""A verifier in the reward: what it adds, what it never changes, and the alarm."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from swe_rl.evaluation.verifier_reward import HackingMonitor, VerifiedRunner, with_verifier
from swe_rl.protocols import Verifier
from swe_rl.rollout.journal import RolloutKey
from swe_rl.rollout.statistics import rollout_metrics, rollout_sums
from swe_rl.testing import make_task
from swe_rl.types import Reward, Task, Trajectory, TrajectoryGroup
from tests.unit.evaluation.attempts import attempt
from tests.unit.rollout.fakes import FIX, SUBMIT, World, make_collector

TASK = make_task()


class Fixed(Verifier):
    def __init__(self, value: float) -> None:
        self.value = value
        self.asked: list[str] = []

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        self.asked.append(trajectory.trajectory_id)
        return self.value


@pytest.mark.parametrize(("score", "solved", "value"), [(0.9, True, 1.2), (0.9, False, 0.2), (0.1, True, 0.8)])
def test_the_score_shifts_the_value_and_not_the_success(score: float, solved: bool, value: float) -> None:
    reward = with_verifier(Reward(value=float(solved), terms={"resolved": float(solved)}), score, weight=0.5)
    assert reward.value == pytest.approx(value)
    assert reward.solved is solved
    assert reward.terms["verifier"] == score


def test_a_score_of_one_half_or_none_adds_nothing() -> None:
    plain = Reward(value=1.0)
    assert with_verifier(plain, 0.5, weight=2.0).value == 1.0
    silent = with_verifier(plain, math.nan, weight=2.0)
    assert (silent.value, silent.solved, silent.terms["verifier_flagged"]) == (1.0, True, 1.0)
    assert "verifier" not in silent.terms


async def test_graded_rollouts_are_judged_and_lost_ones_are_not() -> None:
    collector, _ = make_collector(World(), [FIX, SUBMIT])
    verifier = Fixed(1.0)
    runner = VerifiedRunner(collector._runner, verifier, weight=0.25)
    key = RolloutKey("p", 0, TASK.task_id, 0)
    played = await runner.play(TASK, key, temperature=1.0)
    graded = await runner.grade(TASK, played)
    assert graded.reward is not None
    assert graded.reward.value == pytest.approx(1.125)
    assert verifier.asked == [key.trajectory_id]
    assert (await runner.grade(TASK, replace(played, patch=None))).reward is None
    assert verifier.asked == [key.trajectory_id]
    assert runner.retried == 0


def test_metrics_of_a_step() -> None:
    scored = [(0.9, True), (0.7, False), (0.2, False)]
    attempts = [attempt(TASK, index=i, solved=solved) for i, (_, solved) in enumerate(scored)]
    judged = [
        replace(t, reward=with_verifier(t.reward or Reward(value=0.0), score, weight=0.1))
        for t, (score, _) in zip(attempts, scored, strict=True)
    ]
    group = TrajectoryGroup(group_id="g", task_id=TASK.task_id, trajectories=judged)
    found = rollout_metrics(rollout_sums([group], {}))
    assert found["verifier/score"] == pytest.approx(0.6)
    assert found["verifier/gap"] == pytest.approx(0.6 - 1 / 3)
    assert found["verifier/score_failed"] == pytest.approx(0.45)
    plain = TrajectoryGroup(group_id="g", task_id=TASK.task_id, trajectories=attempts)
    assert not any(name.startswith("verifier/") for name in rollout_metrics(rollout_sums([plain], {})))


def run_steps(rows: list[tuple[float, float]]) -> list[float]:
    """The alarm after each step of (gap, score of failed attempts)."""
    monitor = HackingMonitor(window=3, tolerance=0.1)
    return [
        monitor.add({"verifier/gap": gap, "verifier/score_failed": failed})["verifier/hacking"] for gap, failed in rows
    ]


def test_the_alarm_needs_a_growing_gap_and_failed_attempts_that_please() -> None:
    calm = [(0.2, 0.3)] * 4
    assert run_steps(calm + [(0.5, 0.6)] * 3) == [0, 0, 0, 0, 0, 1, 1]
    assert run_steps([(0.5, 0.6)] * 9) == [0] * 9  # a level is a matter of calibration
    assert (
        run_steps(calm + [(0.5, 0.3)] * 3) == [0] * 7
    )  # more is solved than before, and scores lag behind? no hacking
    assert run_steps(calm + [(0.2, 0.9)] * 3) == [0] * 7
    assert run_steps([(0.2, 0.3), (0.9, 0.9)]) == [0, 0]  # no base line yet
    assert run_steps(calm + [(0.5, 0.6)] * 3 + calm)[-1] == 0


def test_the_base_line_outlives_a_resume() -> None:
    """A run that was stopped after the policy had learnt to please must not take that for its base line."""
    rows = [(0.2, 0.3), (0.2, math.nan), (0.2, 0.3), (0.2, 0.3), (0.5, 0.6), (0.5, 0.6), (0.5, 0.6)]
    whole = run_steps(rows)
    assert whole[-1] == 1
    for stop in range(len(rows)):
        before = HackingMonitor(window=3, tolerance=0.1)
        for gap, failed in rows[:stop]:
            before.add({"verifier/gap": gap, "verifier/score_failed": failed})
        after = HackingMonitor(window=3, tolerance=0.1)
        after.load_state(json.loads(json.dumps(before.state(), allow_nan=False)))
        later = [after.add({"verifier/gap": g, "verifier/score_failed": f})["verifier/hacking"] for g, f in rows[stop:]]
        assert later == whole[stop:]
    fresh = HackingMonitor()
    fresh.load_state({})
    assert not fresh.first
    assert not fresh.last


def test_without_a_verifier_there_is_nothing_to_watch() -> None:
    monitor = HackingMonitor()
    assert monitor.add({"rollout/success": 0.5}) == {}
    assert monitor.add({"verifier/gap": 0.1}) == {"verifier/gap_growth": 0.0, "verifier/hacking": 0.0}
