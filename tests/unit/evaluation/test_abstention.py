"""Risk against coverage, and the tool by which a policy declines to answer."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from swe_rl.agents import SweEnvironment, load_prompt
from swe_rl.agents.toolsets import make_toolset
from swe_rl.config import AgentConfig
from swe_rl.config.agent import validate_agent
from swe_rl.errors import ConfigError
from swe_rl.evaluation.abstention import answers, area_under_risk, confidences, perfect_area, risk_coverage
from swe_rl.evaluation.attempt import outcome_of
from swe_rl.evaluation.candidates import Candidate, candidate_of
from swe_rl.rollout import Collector
from swe_rl.rollout.journal import RolloutKey
from swe_rl.testing import ScriptedPolicy, make_task
from swe_rl.types import StopReason
from tests.unit.rollout.fakes import FIX, XML, World, make_parts


def item(index: int, **values: object) -> Candidate:
    fields: dict[str, object] = {"patch": "+x", "patch_digest": "d", "num_turns": 2, **values}
    return Candidate(trajectory_id=str(index), task_id=f"t{index % 2}", repository="r", **fields)  # type: ignore[arg-type]


def test_risk_by_hand_with_equal_confidences_together() -> None:
    points = risk_coverage([0.9, 0.5, 0.5, 0.1, -math.inf], [True, False, True, False, True])
    assert [(p.threshold, p.coverage, p.risk) for p in points] == [
        (0.9, 0.2, 0.0),
        (0.5, 0.6, pytest.approx(1 / 3)),
        (0.1, 0.8, 0.5),
    ]
    assert risk_coverage([-math.inf], [True]) == []


def test_area_averages_ties_as_all_orders_do() -> None:
    draw = random.Random(0)
    values = [draw.choice([0.2, 0.6, 0.9]) for _ in range(6)]
    passed = [draw.random() < 0.5 for _ in range(6)]
    areas = []
    for order in itertools.permutations(range(6)):
        wrong, total = 0, 0.0
        for count, index in enumerate(sorted(order, key=lambda i: -values[i]), 1):
            wrong += not passed[index]
            total += wrong / count
        areas.append(total / 6)
    assert area_under_risk(values, passed) == pytest.approx(sum(areas) / len(areas))
    assert perfect_area(passed) <= area_under_risk(values, passed)
    assert perfect_area(passed) == pytest.approx(area_under_risk([float(p) for p in passed], passed))
    assert math.isnan(area_under_risk([], []))


def test_what_was_not_answered_has_no_confidence() -> None:
    items = [
        item(0, ef_score=0.7, mean_logprob=-0.1),
        item(1, ef_score=0.7, stop_reason="abstained"),
        item(2, ef_score=0.7, patch=""),
        item(3, ef_score=None),
        item(4, ef_score=0.0),
        item(5, ef_score=0.7, ef_flag="no answer"),
    ]
    assert confidences(items, "verifier") == [0.7, -math.inf, -math.inf, -math.inf, 0.0, -math.inf]
    assert confidences(items, "entropy") == [-0.1, *[-math.inf] * 5]
    assert confidences(items, "short")[0] == -2.0


def test_answers_are_all_rollouts_or_one_choice_per_task() -> None:
    items = [item(i, ef_score=i / 10) for i in range(6)]
    tasks = {"t0": items[0::2], "t1": items[1::2]}
    assert len(answers(tasks)) == 6
    assert [c.trajectory_id for c in answers(tasks, selector="ef")] == ["4", "5"]


async def test_the_tool_ends_the_episode_with_the_configured_reward_and_no_test_run() -> None:
    abstain = XML.render("abstain", {"reason": "too hard"})
    cfg = AgentConfig(abstain=True, abstain_reward=0.25)
    validate_agent(cfg)
    toolset = make_toolset(cfg)
    assert "abstain" in toolset.signatures
    assert "abstain" not in make_toolset(AgentConfig()).signatures
    world = World()
    parts = replace(
        make_parts(world),
        make_environment=lambda box: SweEnvironment(
            box, prompt=load_prompt("nano"), action_format=XML, toolset=toolset
        ),
        limits=replace(cfg, max_context_tokens=4096, max_turn_tokens=400),
    )
    policy = ScriptedPolicy(lambda session, turn: [FIX, abstain][turn])
    collector = Collector(policy, parts=parts, concurrency=2, seed=7)
    task = make_task("a")
    found = await collector.run_one(task, 0, phase="eval-x", step=0)
    assert found.stop_reason is StopReason.ABSTAINED
    assert found.detail == "too hard"
    assert found.reward is not None
    assert (found.reward.value, found.reward.solved) == (0.25, False)
    assert world.graded == 0, "nothing was handed in"
    assert outcome_of(found, task) == "abstained"
    assert candidate_of(found, task).abstained
    assert found.trajectory_id == RolloutKey("eval-x", 0, "a", 0).trajectory_id


def test_a_reward_for_a_tool_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent.abstain_reward=0.5 does nothing with agent.abstain=false"):
        validate_agent(AgentConfig(abstain_reward=0.5))
