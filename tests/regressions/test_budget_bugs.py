"""Bugs of other systems in budgets and over-long penalties, each with its formula beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from immunity import immune

from swe_rl.agents.budget import Budget
from swe_rl.algorithms import soft_overlong
from swe_rl.algorithms.penalties import length_of
from swe_rl.config import AgentConfig
from swe_rl.config.stop_presets import STOP_PRESETS
from swe_rl.types import Completion, StopReason, Trajectory, Turn

LIMITS = AgentConfig(max_context_tokens=100, max_turn_tokens=30, max_turns=5, max_generated_tokens=50)


def turn(context: int, sampled: int) -> Turn:
    completion = Completion(
        token_ids=[1] * sampled,
        rollout_logprobs=[0.0] * sampled,
        finish_reason="stop",
        policy_version=0,
        policy_version_max=0,
    )
    return Turn(context_ids=[0] * context, completion=completion, tool_call=None, observation="")


def rollout(*turns: tuple[int, int], stop: StopReason = StopReason.SUBMITTED) -> Trajectory:
    return Trajectory(
        trajectory_id="t",
        task_id="t",
        group_id="g",
        rollout_index=0,
        turns=[turn(*sizes) for sizes in turns],
        stop_reason=stop,
        temperature=1.0,
    )


def test_a_resumed_rollout_starts_with_a_full_budget() -> None:
    """verl 7207: prompt and partial response counted as prompt, so a resumed rollout could exceed its response
    budget."""

    def as_prompt(earlier: Trajectory) -> int:
        fresh = Budget(LIMITS)
        assert fresh.admit(len(earlier.token_ids)) is None
        return fresh.room()

    def continued(earlier: Trajectory) -> int:
        return Budget.after(LIMITS, earlier).room()

    def check(room_after: Callable[[Trajectory], int]) -> None:
        assert room_after(rollout((10, 25), (5, 15))) == 10, "50 sampled tokens in all, 40 are used"

    immune(check, ours=continued, buggy=as_prompt)


def test_a_penalty_on_what_tools_printed() -> None:
    """OpenRLHF 1243, slime 2261: the response length counted tool tokens, so long observations were punished."""

    def span(episode: Trajectory) -> int:
        return len(episode.token_ids)

    def check(length: Callable[[Trajectory], int]) -> None:
        assert soft_overlong(length(rollout((4, 10), (80, 10))), start=40, end=60) == 0.0

    immune(check, ours=lambda episode: length_of(episode, "tokens"), buggy=span)


def test_a_cap_per_turn_applied_to_the_whole_episode() -> None:
    """rLLM 575: merged turns were cut at the limit of one."""

    def capped(turns: Sequence[tuple[int, int]]) -> int:
        return min(sum(sampled for _, sampled in turns), LIMITS.max_turn_tokens)

    def counted(turns: Sequence[tuple[int, int]]) -> int:
        return Budget.after(LIMITS, rollout(*turns)).generated_tokens

    def check(total: Callable[[Sequence[tuple[int, int]]], int]) -> None:
        assert total([(1, 20), (1, 25)]) == 45

    immune(check, ours=counted, buggy=capped)


def test_over_long_recognised_by_a_missing_end_token() -> None:
    """SkyRL 1319: a rollout was over-long unless its last token was one fixed id; other models end otherwise."""
    mask = STOP_PRESETS["compact"]

    def by_end_id(episode: Trajectory) -> bool:
        return episode.token_ids[-1] != 2

    def by_reason(episode: Trajectory) -> bool:
        return mask.get(str(episode.stop_reason), "keep") != "keep"

    def check(is_over_long: Callable[[Trajectory], bool]) -> None:
        assert not is_over_long(rollout((3, 4)))
        assert is_over_long(rollout((3, 4), stop=StopReason.MAX_TOKENS))

    immune(check, ours=by_reason, buggy=by_end_id)


def test_lengths_counted_on_text() -> None:
    """SkyRL 764: the length of a response was its number of characters."""

    def characters(episode: Trajectory) -> int:
        return sum(len("token ") * len(t.completion.token_ids) for t in episode.turns)

    def check(length: Callable[[Trajectory], int]) -> None:
        assert length(rollout((3, 4), (1, 6))) == 10

    immune(check, ours=lambda episode: length_of(episode, "tokens"), buggy=characters)


@pytest.mark.parametrize("length", [0, 10])
def test_a_short_episode_is_never_rewarded_for_being_short(length: int) -> None:
    """Without the lower bound of the ramp a short answer would earn a bonus."""

    def unbounded(n: int) -> float:
        return (10 - n) / 30

    def check(penalty: Callable[[int], float]) -> None:
        assert [penalty(n) for n in (0, length, 25, 99)] == [0.0, 0.0, -0.5, -1.0]

    immune(check, ours=lambda n: soft_overlong(n, start=10, end=40), buggy=unbounded)
