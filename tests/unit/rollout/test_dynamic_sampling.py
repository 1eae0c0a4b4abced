"""Groups without a signal are replaced, stragglers are cut, filtered rollouts need no test run; statistics keep all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from swe_rl.config import AlgoConfig, PhaseConfig, RolloutConfig, TrainConfig
from swe_rl.config.stop_presets import STOP_PRESETS, untested_reasons
from swe_rl.rollout import Journal
from swe_rl.rollout.statistics import Losses, rollout_metrics, rollout_sums
from swe_rl.sample_streams import Share, refill, rollout_stream, step_tasks
from swe_rl.testing import make_task
from swe_rl.types import Reward, StopReason, Task, Trajectory, TrajectoryGroup
from tests.unit.rollout.fakes import FIX, LOOK, SUBMIT, World, make_collector

GOOD = [FIX, SUBMIT]
PHASE = PhaseConfig(name="rl", data="rollouts", steps=1, tasks_per_step=2)


def tasks(count: int) -> list[Task]:
    return [replace(make_task(), task_id=f"task-{i}") for i in range(count)]


def solved_by(*, easy: set[str], hard: set[str]) -> Callable[[str, int], str]:
    """Everybody solves `easy` tasks and nobody `hard` ones; of the others only even rollouts."""

    def script(session: str, turn: int) -> str:
        _, _, task, index = session.split("/")
        wins = task in easy or (task not in hard and int(index) % 2 == 0)
        return (GOOD if wins else [SUBMIT])[turn]

    return script


def config(**algo: Any) -> TrainConfig:
    return TrainConfig(algo=AlgoConfig(**{"drop_uniform_groups": True, **algo}), rollout=RolloutConfig(group_size=2))


async def first_step(cfg: TrainConfig, count: int, script: Any, **options: Any) -> Any:
    collector, _ = make_collector(World(), script, **options)
    async for step in rollout_stream(collector, tasks(count), PHASE, cfg, first_step=0, share=Share()):
        return step
    return None


async def test_uniform_groups_are_replaced_within_bounded_rounds() -> None:
    """Of 8 tasks only two tell anything. Two are wanted: rounds go on until both are found or no round is left."""
    informative = {"task-3", "task-6"}
    others = {f"task-{i}" for i in range(8)} - informative
    script = solved_by(easy=set(sorted(others)[:3]), hard=set(sorted(others)[3:]))
    found = await first_step(config(refill_rounds=10), 8, script)
    assert {s.trajectory_id.split("/")[2] for s in found.samples} == informative
    assert found.metrics["rollout/solve_partial"] == 2
    assert found.metrics["rollout/refilled"] == found.metrics["rollout/uniform"]
    assert 1 <= found.metrics["rollout/refill_rounds"] <= 6
    none = await first_step(config(), 8, script)
    assert none.metrics["rollout/refilled"] == 0
    assert len(none.samples) == 2 * none.metrics["rollout/solve_partial"]


async def test_rounds_are_bounded_and_the_statistics_keep_what_was_dropped() -> None:
    found = await first_step(config(refill_rounds=2), 8, solved_by(easy={f"task-{i}" for i in range(8)}, hard=set()))
    assert found.samples == []
    assert found.metrics["rollout/refill_rounds"] == 2
    assert found.metrics["rollout/refilled"] == 4
    assert found.metrics["rollout/solve_all"] == 6
    assert found.metrics["rollout/success"] == 1.0, "dropping groups must not change the success that is reported"


async def test_tasks_run_out_before_the_rounds_do() -> None:
    found = await first_step(config(refill_rounds=50), 5, solved_by(easy=set(), hard={f"task-{i}" for i in range(5)}))
    assert found.metrics["rollout/solve_none"] == 5
    assert found.metrics["rollout/refill_rounds"] == 2  # 2 of 2 tasks, then the last one


async def test_two_ranks_refill_what_is_missing_over_both() -> None:
    """Each rank runs its part; they agree on what is missing and share the new tasks."""
    cfg = config(refill_rounds=3)
    given = [task.task_id for task in step_tasks(tasks(6), step=0, count=2, seed=cfg.seed, phase="rl")]
    script = solved_by(easy=set(given), hard=set())
    meeting = _Meeting(2)

    async def rank(number: int) -> list[str]:
        collector, _ = make_collector(World(), script)
        share = Share(rank=number, world_size=2, gather=meeting.gather(number))
        own = share.of(step_tasks(tasks(6), step=0, count=2, seed=cfg.seed, phase="rl"))
        groups = [await collector.collect_group(task, 2, phase="rl", step=0) for task in own]
        found = await refill(collector, groups, tasks(6), PHASE, cfg, step=0, count=2, share=share)
        assert found is not None
        return [group.task_id for group in found.groups]

    first, second = await asyncio.gather(rank(0), rank(1))
    assert [first[0], second[0]] == given
    assert len({*first, *second}) == len(first) + len(second), "no task twice"
    assert sum(t not in given for t in (*first, *second)) == 2


class _Meeting:
    """A gather for ranks that live in threads of one process."""

    def __init__(self, size: int) -> None:
        import threading

        self.barrier, self.parts = threading.Barrier(size), [[] for _ in range(size)]  # type: ignore[var-annotated]

    def gather(self, rank: int) -> Callable[[list[Any]], list[Any]]:
        def call(values: list[Any]) -> list[Any]:
            self.parts[rank] = list(values)
            self.barrier.wait(timeout=60)
            found = [value for part in self.parts for value in part]
            self.barrier.wait(timeout=60)
            return found

        return call


async def test_spare_rollouts_cut_stragglers_and_report_the_bias(tmp_path: Any) -> None:
    world = World()
    with closing(Journal(tmp_path)) as journal:
        collector, _ = make_collector(world, GOOD, concurrency=8, journal=journal)
        slow = collector._runner.play

        async def play(task: Task, key: Any, *, temperature: float) -> Trajectory:
            if key.rollout_index % 2:
                await asyncio.sleep(30)
            return await slow(task, key, temperature=temperature)

        collector._runner.play = play  # type: ignore[method-assign]
        losses = Losses(collector)
        group = await collector.collect_group(make_task(), 2, phase="rl", step=0, spare=2)
        assert [t.rollout_index for t in group.trajectories] == [0, 2]
        assert world.alive == 0, "what was cut is closed"
        metrics = rollout_metrics(rollout_sums([group], losses.since_last()))
        assert metrics["rollout/cut"] == 2
        assert metrics["rollout/cut_share"] == 0.5
        assert 0 < metrics["rollout/kept_s"]
        assert metrics["rollout/short_bias"] > 0
        again, _ = make_collector(World(), GOOD, journal=journal)
        resumed = await again.collect_group(make_task(), 2, phase="rl", step=0, spare=2)
        assert [t.rollout_index for t in resumed.trajectories] == [0, 2], "a resumed run keeps the same rollouts"


async def test_without_spare_rollouts_nothing_is_cut() -> None:
    collector, _ = make_collector(World(), GOOD)
    group = await collector.collect_group(make_task(), 3, phase="rl", step=0)
    assert len(group.trajectories) == 3
    assert collector.stats.cut == collector.stats.kept == 0
    metrics = rollout_metrics(rollout_sums([group], {}))
    assert not any("cut" in name for name in metrics)


async def test_filtered_rollouts_are_not_tested(tmp_path: Any) -> None:
    world = World()
    collector, _ = make_collector(world, [LOOK] * 9, max_turns=2)
    parts = collector._runner._parts  # type: ignore[attr-defined]
    collector._runner._parts = replace(parts, untested=frozenset({StopReason.MAX_TURNS}))  # type: ignore[attr-defined]
    got = await collector.run_one(make_task(), 0, phase="rl", step=0)
    assert got.stop_reason is StopReason.MAX_TURNS
    assert world.graded == 0
    assert got.reward is not None
    assert (got.reward.value, got.reward.terms) == (0.0, {"untested": 1.0})
    group = TrajectoryGroup(group_id="g", task_id="t", trajectories=[got, replace(got, reward=Reward(value=1.0))])
    metrics = rollout_metrics(rollout_sums([group], {}))
    assert metrics["rollout/untested"] == 1
    assert metrics["rollout/success"] == 1.0, "an untested rollout says nothing about success"
    assert metrics["rollout/reward_mean"] == 0.5


@pytest.mark.parametrize("preset", STOP_PRESETS)
def test_untested_reasons_follow_the_preset(preset: str) -> None:
    assert untested_reasons(AlgoConfig(stop_preset=preset)) == frozenset()
    found = untested_reasons(AlgoConfig(stop_preset=preset, run_tests_on_filtered=False))
    assert found == frozenset(StopReason(reason) for reason in STOP_PRESETS[preset])
