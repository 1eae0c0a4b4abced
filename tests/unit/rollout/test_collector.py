"""Groups of rollouts over fakes: retries, refills, drain, cancellation, resume."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from swe_rl.errors import (
    EngineDead,
    EngineError,
    InvariantError,
    PatchError,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
)
from swe_rl.rollout import Drained, Journal
from swe_rl.testing import exec_result, make_task
from swe_rl.types import Reward, StopReason, Task, TrajectoryGroup
from tests.unit.rollout.fakes import FIX, LOOK, SUBMIT, World, make_collector

GOOD = [FIX, SUBMIT]


def by_index(session: str, turn: int) -> str:
    """Even indices repair, odd ones submit at once."""
    return (GOOD if int(session.rsplit("/", 1)[1]) % 2 == 0 else [SUBMIT])[turn]


async def test_group_has_patches_rewards_and_timings() -> None:
    world = World()
    collector, policy = make_collector(world, by_index)
    group = await collector.collect_group(make_task(), 4, phase="rl", step=3)
    assert [item.reward.value for item in group.trajectories if item.reward] == [1.0, 0.0, 1.0, 0.0]
    assert [item.rollout_index for item in group.trajectories] == [0, 1, 2, 3]
    assert group.group_id == "rl/3/add-0"
    assert group.dropped is None
    first = group.trajectories[0]
    assert first.trajectory_id == "rl/3/add-0/0"
    assert first.patch == b"def add(a, b):\n    return a + b\n"
    assert group.trajectories[1].patch == b""
    assert {"open_sandbox", "patch", "grade", "policy", "environment", "episode"} <= set(first.timings_s)
    assert sorted(policy.released) == [f"rl/3/add-0/{i}" for i in range(4)]
    assert world.alive == 0
    assert collector.stats.passed == 2
    assert collector.stats.finished == 4
    assert collector.stats.sampled_tokens == sum(item.num_sampled_tokens for item in group.trajectories)


async def test_seeds_differ_by_index_turn_step_and_phase() -> None:
    collector, policy = make_collector(World(), GOOD)
    for phase, step in (("rl", 0), ("rl", 1), ("eval", 0)):
        await collector.collect_group(make_task(), 2, phase=phase, step=step)
    assert len(set(policy.seeds.values())) == len(policy.seeds) == 12
    again, policy_again = make_collector(World(), GOOD)
    await again.collect_group(make_task(), 2, phase="rl", step=1)
    assert policy_again.seeds.items() <= policy.seeds.items()


async def test_trouble_is_retried_with_the_same_seeds() -> None:
    world = World(open_failures={0: SandboxError("no place")})
    collector, _ = make_collector(world, GOOD)
    got = await collector.run_one(make_task(), 0, phase="rl", step=0)
    assert got.reward is not None
    assert got.reward.value == 1.0
    assert collector.retried == 1
    assert world.opened == 2
    assert world.alive == 0


async def test_lost_rollouts_are_refilled_and_never_scored() -> None:
    def script(session: str, turn: int) -> str | Exception:
        return EngineError("down") if session.endswith("/1") else GOOD[turn]

    collector, _ = make_collector(World(), script, infra_retries=1)
    group = await collector.collect_group(make_task(), 3, phase="rl", step=0)
    assert [item.rollout_index for item in group.trajectories] == [0, 2, 3]
    assert all(item.reward is not None for item in group.trajectories)
    assert collector.stats.lost == 1
    assert collector.retried == 1
    assert collector.stats.stop_reasons == {"submitted": 3, "infra_error": 1}


@pytest.mark.parametrize("place", ["open", "grade"])
async def test_a_machine_without_sandboxes_stops_the_run(place: str) -> None:
    failure: dict[int, Exception] = {0: SandboxUnavailable("no user namespaces")}
    world = World(open_failures=failure) if place == "open" else World(grade_failures=failure)
    collector, _ = make_collector(world, GOOD)
    with pytest.raises(SandboxUnavailable):
        await collector.collect_group(make_task(), 1, phase="rl", step=0)


async def test_refills_are_bounded_and_an_empty_group_says_so() -> None:
    world = World(open_failures={n: SandboxError("no place") for n in range(100)})
    collector, _ = make_collector(world, GOOD, infra_retries=1)
    group = await collector.collect_group(make_task(), 3, phase="rl", step=0)
    assert group.trajectories == []
    assert group.dropped == "infrastructure"
    assert world.opened == 3 * 2 * 2


async def test_grading_trouble_is_no_reward() -> None:
    world = World(grade_failures={0: SandboxError("grader")})
    collector, _ = make_collector(world, GOOD)
    got = await collector.run_one(make_task(), 0, phase="rl", step=0)
    assert got.stop_reason is StopReason.INFRA_ERROR
    assert got.reward is None
    assert got.detail == "grading: SandboxError('grader')"
    group = await collector.collect_group(make_task(), 1, phase="rl", step=1)
    assert len(group.trajectories) == 1


async def test_a_sandbox_lost_at_the_same_action_every_time_is_still_the_machines() -> None:
    """As when the lease is shorter than the command: an outage of the set-up, never a 0."""
    world = World(commands={"ls": SandboxLost("the sandbox ended: lease ended")})
    collector, _ = make_collector(world, [LOOK, SUBMIT])
    got = await collector.run_one(make_task(), 0, phase="rl", step=0)
    assert (got.stop_reason, got.reward, world.opened) == (StopReason.INFRA_ERROR, None, 3)
    assert "lease ended" in collector.stats.last_loss


async def test_a_sandbox_that_says_the_agent_ended_it_scores_zero() -> None:
    world = World(commands={"ls": exec_result("bye", outcome="lost")})
    collector, _ = make_collector(world, [LOOK, SUBMIT])
    got = await collector.run_one(make_task(), 0, phase="rl", step=0)
    assert got.stop_reason is StopReason.ENV_KILLED
    assert got.reward is not None
    assert got.reward.value == 0.0
    assert got.reward.terms == {"env_killed": 1.0}
    assert got.reward.tests_total == 2
    assert world.opened == 1


async def test_a_sandbox_lost_once_is_the_machines() -> None:
    world = World()
    losses = iter([SandboxLost("stream ended")])
    world.commands = {"ls": lambda sandbox, command: next(losses, None)}
    collector, _ = make_collector(world, [LOOK, *GOOD])
    got = await collector.run_one(make_task(), 0, phase="rl", step=0)
    assert got.stop_reason is StopReason.SUBMITTED
    assert got.reward is not None
    assert got.reward.value == 1.0


async def test_impossible_patch_scores_zero() -> None:
    def refuse(sandbox: object) -> bytes:
        raise PatchError("too large", reason="too_large")

    world = World(extract=refuse)
    collector, _ = make_collector(world, GOOD)
    got = await collector.run_one(make_task(), 0, phase="rl", step=0)
    assert got.stop_reason is StopReason.SUBMITTED
    assert got.reward is not None
    assert got.reward.value == 0.0
    assert got.reward.terms == {"patch_too_large": 1.0}
    assert got.patch is None
    assert world.graded == 0


async def test_truncated_episodes_are_graded() -> None:
    collector, _ = make_collector(World(), [FIX, LOOK, LOOK], max_turns=2)
    got = await collector.run_one(make_task(), 0, phase="rl", step=0)
    assert got.stop_reason is StopReason.MAX_TURNS
    assert got.reward is not None
    assert got.reward.value == 1.0


@pytest.mark.parametrize("ordered", [False, True])
async def test_groups_of_many_tasks_within_the_bound(ordered: bool) -> None:
    world = World()
    collector, _ = make_collector(world, GOOD, concurrency=3, delay_s=0.001)
    tasks = [make_task(f"t{i}") for i in range(7)]
    got = [group async for group in collector.groups(tasks, group_size=2, phase="rl", step=0, ordered=ordered)]
    assert sorted(group.task_id for group in got) == sorted(task.task_id for task in tasks)
    if ordered:
        assert [group.task_id for group in got] == [task.task_id for task in tasks]
    assert world.peak <= 3
    assert collector.stats.finished == 14


async def test_leaving_the_iterator_leaves_nothing_behind() -> None:
    world = World()
    collector, policy = make_collector(world, GOOD, delay_s=0.005)
    groups = collector.groups([make_task(f"t{i}") for i in range(9)], group_size=2, phase="rl", step=0)
    async with aclosing(groups):
        async for _ in groups:
            break
    assert world.alive == 0
    assert len(policy.released) >= world.opened
    assert len(asyncio.all_tasks()) == 1


async def test_cancellation_leaves_nothing_behind() -> None:
    world = World()
    collector, _ = make_collector(world, GOOD, delay_s=5.0)

    async def consume() -> None:
        async for _ in collector.groups([make_task(f"t{i}") for i in range(9)], group_size=2, phase="rl", step=0):
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.02)
    assert world.alive == 4
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.alive == 0
    assert len(asyncio.all_tasks()) == 1


async def test_a_bug_is_raised_and_cancels_the_rest() -> None:
    def script(session: str, turn: int) -> str | Exception:
        return InvariantError("drift") if "/t1/" in session else GOOD[turn]

    world = World()
    collector, _ = make_collector(world, script, delay_s=0.01)
    with pytest.raises(InvariantError, match="drift"):
        async for _ in collector.groups([make_task(f"t{i}") for i in range(9)], group_size=2, phase="rl", step=0):
            pass
    assert world.alive == 0
    assert len(asyncio.all_tasks()) == 1


async def test_a_dead_engine_is_raised_at_once() -> None:
    collector, _ = make_collector(World(), lambda session, turn: EngineDead("device lost"))
    with pytest.raises(EngineDead):
        await collector.collect_group(make_task(), 2, phase="rl", step=0)
    assert collector.retried == 0


async def test_a_crash_behind_the_first_group_does_not_wait_for_it() -> None:
    never = asyncio.Event()

    class Stuck(World):
        async def grade(self, task: Task, patch: bytes) -> Reward:
            if task.task_id == "t0":
                await never.wait()
            return await super().grade(task, patch)

    world = Stuck()
    collector, _ = make_collector(
        world, lambda session, turn: InvariantError("drift") if "/t1/" in session else GOOD[turn]
    )
    groups = collector.groups([make_task(f"t{i}") for i in range(4)], group_size=2, phase="rl", step=0, ordered=True)
    with pytest.raises(InvariantError, match="drift"):
        await asyncio.wait_for(anext(groups), 5)
    await groups.aclose()
    assert world.alive == 0


async def test_drain_finishes_what_runs_and_resume_repeats_nothing(tmp_path: Path) -> None:
    tasks = [make_task(f"t{i}") for i in range(5)]

    async def collect(groups: AsyncIterator[TrajectoryGroup]) -> list[TrajectoryGroup]:
        return [group async for group in groups]

    journal = Journal(tmp_path)
    collector, policy = make_collector(World(), by_index, journal=journal, concurrency=2, delay_s=0.01)
    running = asyncio.create_task(collect(collector.groups(tasks, group_size=4, phase="rl", step=0)))
    await asyncio.sleep(0.025)
    collector.drain()
    early = await running
    assert len(early) < 5
    begun = {session for session, _ in policy.seeds}
    assert len(journal.finished("rl", 0)) == len(begun) > 0
    with pytest.raises(Drained):
        await collector.run_one(tasks[4], 3, phase="rl", step=0)
    journal.close()

    journal = Journal(tmp_path)
    resumed, second = make_collector(World(), by_index, journal=journal)
    got = await collect(resumed.groups(tasks, group_size=4, phase="rl", step=0, ordered=True))
    assert begun.isdisjoint({session for session, _ in second.seeds})
    assert resumed.stats.reused == len(begun)
    whole, _ = make_collector(World(), by_index)
    want = await collect(whole.groups(tasks, group_size=4, phase="rl", step=0, ordered=True))
    for one, other in zip(got, want, strict=True):
        for left, right in zip(one.trajectories, other.trajectories, strict=True):
            assert (left.turns, left.reward, left.patch) == (right.turns, right.reward, right.patch)
    journal.close()


async def test_an_outage_in_a_step_can_be_resumed(tmp_path: Path) -> None:
    """All of a step is lost, as when a disk is full; the next process plays it with new indices."""
    tasks = [make_task("a"), make_task("b")]
    for _ in range(2):  # the outage may last over a resume
        journal = Journal(tmp_path)
        down, _ = make_collector(
            World(open_failures={n: SandboxError("disk full") for n in range(100)}), GOOD, journal=journal
        )
        lost = [g async for g in down.groups(tasks, group_size=3, phase="rl", step=0, ordered=True)]
        assert [(group.trajectories, group.dropped) for group in lost] == [([], "infrastructure")] * 2
        journal.close()
    journal = Journal(tmp_path)
    collector, policy = make_collector(World(), GOOD, journal=journal)
    got = [g async for g in collector.groups(tasks, group_size=3, phase="rl", step=0, ordered=True)]
    assert [[item.rollout_index for item in group.trajectories] for group in got] == [[12, 13, 14]] * 2
    assert [[item.reward.value for item in group.trajectories if item.reward] for group in got] == [[1.0] * 3] * 2
    assert (collector.stats.lost, collector.stats.reused) == (0, 0)
    journal.close()
    again, policy = make_collector(World(), GOOD, journal=Journal(tmp_path))
    assert [g async for g in again.groups(tasks, group_size=3, phase="rl", step=0, ordered=True)] == got
    assert policy.seeds == {}


async def test_lost_rollouts_stay_lost_after_a_resume(tmp_path: Path) -> None:
    def script(session: str, turn: int) -> str | Exception:
        return EngineError("down") if session.endswith("/0") else GOOD[turn]

    journal = Journal(tmp_path)
    collector, _ = make_collector(World(), script, journal=journal, infra_retries=0)
    first = await collector.collect_group(make_task(), 2, phase="rl", step=0)
    again, policy = make_collector(World(), GOOD, journal=Journal(tmp_path))
    second = await again.collect_group(make_task(), 2, phase="rl", step=0)
    assert first == second
    assert [item.rollout_index for item in second.trajectories] == [1, 2]
    assert policy.seeds == {}
    journal.close()


VICTIM = """
import asyncio, sys
from swe_rl.rollout import Journal
from swe_rl.testing import make_task
from tests.unit.rollout.fakes import World, make_collector
from tests.unit.rollout.test_collector import by_index, make_tasks

async def main():
    collector, _ = make_collector(World(), by_index, journal=Journal(sys.argv[1]), delay_s=0.002)
    collector._on_rollout = lambda task, trajectory: print(trajectory.trajectory_id, flush=True)
    async for _ in collector.groups(make_tasks(), group_size=4, phase="rl", step=0):
        pass

asyncio.run(main())
"""


def make_tasks() -> list[Task]:
    return [make_task(f"t{i}") for i in range(50)]


async def test_sigkill_and_resume_repeat_no_finished_rollout(tmp_path: Path) -> None:
    finished: set[str] = set()
    command = [sys.executable, "-c", VICTIM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            finished.add(line.strip())
            if len(finished) == 57:
                process.send_signal(signal.SIGKILL)
    journal = Journal(tmp_path)
    collector, policy = make_collector(World(), by_index, journal=journal)
    got = [g async for g in collector.groups(make_tasks(), group_size=4, phase="rl", step=0, ordered=True)]
    assert len(finished) >= 57
    assert finished.isdisjoint({session for session, _ in policy.seeds})
    assert collector.stats.reused >= len(finished)
    rewards = [[item.reward.value for item in group.trajectories if item.reward] for group in got]
    assert rewards == [[1.0, 0.0, 1.0, 0.0]] * 50
    journal.close()
