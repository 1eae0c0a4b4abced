"""The one object that holds all limits of an episode: hard ends, reminders, and going on after a resume."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swe_rl.agents.budget import Budget, OutOfTime
from swe_rl.config import AgentConfig
from swe_rl.types import Completion, StopReason, Trajectory, Turn


def budget(**limits: Any) -> Budget:
    return Budget(AgentConfig(**{"max_context_tokens": 100, "max_turn_tokens": 30, "max_turns": 5, **limits}))


def completion(length: int, reason: Any = "stop") -> Completion:
    return Completion(
        token_ids=[0] * length,
        rollout_logprobs=[0.0] * length,
        finish_reason=reason,
        policy_version=0,
        policy_version_max=0,
    )


def reason(end: Any) -> StopReason | None:
    return None if end is None else end.reason


def test_context_limit_and_prompt_too_long() -> None:
    got = budget()
    assert reason(got.admit(100)) is StopReason.PROMPT_TOO_LONG
    assert got.context_tokens == 0
    assert got.admit(60) is None
    assert got.room() == 30
    assert got.spend(completion(30, "length")) is None  # the turn's own limit
    assert reason(got.admit(10)) is StopReason.CONTEXT_LIMIT
    assert got.admit(9) is None
    assert got.room() == 1
    assert reason(got.spend(completion(1, "length"))) is StopReason.MAX_TOKENS


def test_a_shorter_context_makes_room() -> None:
    got = budget()
    assert got.admit(70) is None
    assert got.spend(completion(20)) is None
    assert got.admit(25, kept=40) is None
    assert got.context_tokens == 65
    assert got.room() == 30


def test_generated_tokens_are_counted_over_the_whole_episode() -> None:
    got = budget(max_generated_tokens=40)
    assert got.admit(10) is None
    assert got.spend(completion(25)) is None
    assert got.admit(5, kept=10) is None  # what was sampled has left the context, and still counts
    assert got.room() == 15
    assert reason(got.spend(completion(15, "length"))) is StopReason.MAX_TOKENS
    other = budget(max_generated_tokens=40)
    assert other.admit(10) is None
    assert other.spend(completion(40)) is None  # complete: its call is run
    end = other.admit(1)
    assert end is not None
    assert (end.reason, end.detail) == (StopReason.MAX_TOKENS, "agent.max_generated_tokens=40")


def test_turns() -> None:
    got = budget(max_turns=2)
    got.spend(completion(1))
    assert got.last_turn() is None
    got.spend(completion(1))
    assert reason(got.last_turn()) is StopReason.MAX_TURNS


async def test_time_in_tools_adds_up() -> None:
    got = budget(tool_s=0.2, episode_s=60.0)
    async with got.tool_clock():
        await asyncio.sleep(0.05)
    assert 0.05 <= got.tool_s < 0.2
    with pytest.raises(OutOfTime) as caught:
        async with got.tool_clock():
            await asyncio.sleep(9)
    assert caught.value.end.reason is StopReason.ENV_TIMEOUT
    assert caught.value.end.detail.startswith("agent.tool_s=0.2 over")
    assert got.tool_s >= 0.2
    assert reason(got.admit(1)) is StopReason.ENV_TIMEOUT


async def test_the_wall_clock_bounds_tools_as_well() -> None:
    got = budget(episode_s=0.05)
    with pytest.raises(OutOfTime) as caught:
        async with got.tool_clock():
            await asyncio.sleep(9)
    assert caught.value.end.detail.startswith("agent.episode_s=0.05 over")


async def test_a_time_out_of_the_block_itself_is_not_the_budgets() -> None:
    with pytest.raises(TimeoutError):
        async with budget().clock(StopReason.TIMEOUT):
            raise TimeoutError


def reminders(got: Budget, turns: int) -> list[str]:
    lines = []
    for _ in range(turns):
        got.spend(completion(1))
        lines.append(got.reminder())
    return lines


def test_no_reminder_unless_asked_for() -> None:
    assert reminders(budget(), 4) == [""] * 4


def test_steps_left() -> None:
    submit = " Submit now, this is the end of your budget."
    assert reminders(budget(remind_turns=5), 4) == [
        "Steps remaining: 4.",
        "Steps remaining: 3.",
        "Steps remaining: 2.",
        "Steps remaining: 1." + submit,
    ]
    assert reminders(budget(remind_turns=2), 4)[:2] == ["", ""]


def test_a_soft_limit_orders_to_submit_and_goes_on() -> None:
    got = budget(max_turns=9, soft_turns=3, remind_turns=3)
    submit = " Submit now, this is the end of your budget."
    assert reminders(got, 5) == [
        "Steps remaining: 2.",
        f"Steps remaining: 1.{submit}",
        *[f"Steps remaining: 0.{submit}"] * 3,
    ]
    assert got.last_turn() is None


def test_tokens_left() -> None:
    got = budget(remind_tokens=60, remind_turns=4, max_generated_tokens=50)
    assert got.admit(40) is None
    got.spend(completion(15))
    assert got.reminder() == "Steps remaining: 4."
    assert got.admit(5) is None
    assert got.reminder().split("\n")[1].startswith("Tokens remaining: about 35.")  # of 50 sampled
    got.spend(completion(10))
    assert "Tokens remaining: about 25." in got.reminder()


def test_a_resumed_episode_has_what_is_left() -> None:
    def turn(context: int, sampled: int, kept: int | None = None) -> Turn:
        return Turn(
            context_ids=[0] * context,
            completion=completion(sampled),
            tool_call=None,
            observation="",
            kept_context=kept,
        )

    earlier = Trajectory(
        trajectory_id="t",
        task_id="t",
        group_id="g",
        rollout_index=0,
        turns=[turn(10, 5), turn(7, 6), turn(3, 2, kept=10)],
        stop_reason=StopReason.MAX_TURNS,
        temperature=1.0,
        timings_s={"episode": 40.0, "environment": 7.5},
    )
    got = Budget.after(AgentConfig(max_turns=4, episode_s=50.0, tool_s=8.0), earlier)
    assert (got.turns, got.context_tokens, got.generated_tokens, got.tool_s) == (3, 15, 13, 7.5)
    fresh = Budget(AgentConfig())
    assert fresh.started - got.started == pytest.approx(40.0, abs=1.0)
    got.spend(completion(1))
    assert reason(got.last_turn()) is StopReason.MAX_TURNS
