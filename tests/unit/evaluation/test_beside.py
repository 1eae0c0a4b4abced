"""Evaluation beside training: what is merged over ranks, what a drain and a loss leave, and who waits for whom."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from swe_rl.cli.hydra_entry import compose_config
from swe_rl.config import EvalConfig, TrainConfig, validate
from swe_rl.errors import ConfigError, EngineDead, EngineError, InvariantError
from swe_rl.evaluation.benchmark import EvalResult
from swe_rl.evaluation.beside import SideEvaluation
from swe_rl.evaluation.heldout import evaluate_splits
from swe_rl.rollout.collector import Collector
from swe_rl.testing import make_task
from swe_rl.train_loop import begin_side_evaluation
from tests.unit.rollout.fakes import FIX, SUBMIT, World, make_collector

TASKS = {"heldout": [make_task("a"), make_task("b"), make_task("c")]}


def side(script: Any = None, **options: Any) -> SideEvaluation:
    async def play(collector: Collector, name: str) -> list[EvalResult] | None:
        async def stopping() -> bool:
            return collector._draining

        return await evaluate_splits(collector, TASKS, EvalConfig(greedy_tasks=1), name=name, interrupted=stopping)

    return SideEvaluation(
        every=2,
        play=play,
        make_collector=lambda: make_collector(World(), script or [FIX, SUBMIT], infra_retries=0)[0],
        **options,
    )


def test_every_so_many_steps() -> None:
    assert [step for step in range(8) if side().due(step)] == [2, 4, 6]
    never = SideEvaluation(every=0, play=side().play, make_collector=side().make_collector)
    assert not any(never.due(step) for step in range(8))


async def test_the_results_of_all_ranks_are_one_per_split_and_mode() -> None:
    others: list[Any] = []

    def gather(own: list[Any]) -> list[Any]:
        return [*own, *others]

    beside = side(gather=gather)
    assert await beside.finish() == []
    beside.begin("rl-step2")
    (alone,) = [[r for r in await beside.finish() if r.mode == "sampled"]]
    assert [(r.split, r.success, r.num_tasks) for r in alone] == [("heldout", 1.0, 3)]
    others.append([EvalResult(split="heldout", mode="sampled", attempts=[], num_lost=2)])
    beside.begin("rl-step4")
    both = await beside.finish()
    assert [(r.mode, r.num_tasks, r.num_lost) for r in both] == [("sampled", 3, 2), ("greedy", 1, 0)]
    others[0] = None  # another rank was interrupted
    beside.begin("rl-step6")
    assert await beside.finish() == []


async def test_a_drain_keeps_no_half_result_and_losses_stop_no_training() -> None:
    beside = side()
    beside.begin("rl-step2")
    beside.drain()
    assert await beside.finish() == []
    lost = side(lambda session, turn: EngineError("down"))
    lost.begin("rl-step2")
    assert await lost.finish() == []
    assert "were lost to the machine" in lost.trouble


@pytest.mark.parametrize("error", [InvariantError("a logprob is nan"), EngineDead("gone")])
async def test_what_must_stop_the_run_does(error: Exception) -> None:
    beside = side(lambda session, turn: error)
    beside.begin("rl-step2")
    with pytest.raises(type(error), match=str(error)):
        await beside.finish()


@pytest.mark.parametrize("stopping", [False, True])
async def test_a_rank_that_was_told_to_stop_takes_part_in_the_end(stopping: bool) -> None:
    """The others may be told after they have begun: they would wait for its part of the results for ever."""
    gathered: list[Any] = []

    def gather(own: list[Any]) -> list[Any]:
        gathered.extend(own)
        return own

    beside = side(gather=gather)
    run: Any = SimpleNamespace(beside=beside, stopping=stopping, position=SimpleNamespace(step=2))
    phase: Any = SimpleNamespace(name="rl", steps=4, evaluate=True)
    begin_side_evaluation(run, phase)
    found = await beside.finish()
    assert len(gathered) == 1
    assert (gathered == [None]) == (found == []) == stopping


async def test_rollouts_do_not_wait_for_it_and_an_end_of_the_phase_ends_it() -> None:
    may_go = asyncio.Event()

    async def play(collector: Collector, name: str) -> list[EvalResult] | None:
        await may_go.wait()
        return []

    beside = SideEvaluation(every=1, play=play, make_collector=side().make_collector)
    beside.begin("rl-step1")
    collector, _ = make_collector(World(), [FIX, SUBMIT])
    async with aclosing(collector.groups(TASKS["heldout"], group_size=2, phase="rl", step=1)) as groups:
        assert [len(group.trajectories) async for group in groups] == [2, 2, 2]
    assert beside.running is not None
    assert not beside.running.done()
    await beside.close()
    await beside.close()
    assert beside.running is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["eval.every_tasks=8"], "eval.every_tasks=8 does nothing with eval.every=0"),
        (["eval.every=1", "~eval.splits.heldout"], "eval.every=1 needs tasks to play"),
        (["eval.every=1000"], "no phase with data=rollouts has more steps than that"),
        (["eval.every=-1"], "eval.every must be 0 or more"),
    ],
)
def test_settings_that_would_do_nothing(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(compose_config(TrainConfig, "train", ["experiment=smoke", *overrides]))
