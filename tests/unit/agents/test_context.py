"""Leaving old observations out of the context: what the policy sees, and that masks stay exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from swe_rl.agents.context import Context
from swe_rl.agents.episode import run_episode
from swe_rl.agents.formats import FORMATS
from swe_rl.agents.rendering import ChatRenderer
from swe_rl.batching.samples import to_samples
from swe_rl.config import AgentConfig
from swe_rl.errors import InvariantError
from swe_rl.protocols import EnvStep, SamplingParams
from swe_rl.testing import ByteTokenizer, FakeEnvironment, ScriptedPolicy, make_task
from swe_rl.types import Completion, StopReason, Trajectory

XML = FORMATS["xml"]
BASH = XML.render("bash", {"command": "ls"})
RENDERER = ChatRenderer(ByteTokenizer())
DONE = EnvStep(observation="", done=True, stop_reason="submitted")


class Recorder(ScriptedPolicy):
    """Keeps the ids of every prompt; takes contexts that were shortened."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        self.prompts.append(list(prompt_ids))
        self.histories[session] = []
        return await super().generate(prompt_ids, params, session=session)


def limits(**changes: Any) -> AgentConfig:
    return AgentConfig(
        **{
            "max_context_tokens": 5000,
            "max_turn_tokens": 200,
            "max_observation_tokens": 300,
            "max_turns": 30,
            **changes,
        }
    )


async def play(policy: Any, outputs: Sequence[str], *, earlier: Trajectory | None = None, **changes: Any) -> Trajectory:
    env = FakeEnvironment([*(EnvStep(observation=text) for text in outputs), DONE])
    return await run_episode(
        make_task(),
        env,
        policy,
        renderer=RENDERER,
        action_format=XML,
        limits=limits(**changes),
        trajectory_id="t/0",
        group_id="t",
        rollout_index=0,
        seeds=lambda turn: turn,
        earlier=earlier,
    )


def script(count: int) -> list[str]:
    return [f"turn {i} {BASH}" for i in range(count)]


def outputs(count: int, lines: int = 20) -> list[str]:
    return ["\n".join(f"out {i}.{k}" for k in range(lines)) for i in range(count)]


async def test_everything_is_kept_by_default() -> None:
    policy = Recorder(script(7))
    got = await play(policy, outputs(6))
    assert got.stop_reason is StopReason.SUBMITTED
    assert [turn.kept_context for turn in got.turns] == [None] * 7
    for before, after, turn in zip(policy.prompts, policy.prompts[1:], got.turns, strict=False):
        assert after[: len(before)] == before
        assert after[len(before) :][: len(turn.completion.token_ids)] == turn.completion.token_ids
    assert len(to_samples(got, 1.0)) == 1


async def test_old_observations_become_notes_and_nothing_else_changes() -> None:
    policy = Recorder(script(7))
    got = await play(policy, outputs(6), keep_observations=2)
    seen = [ByteTokenizer().decode(prompt) for prompt in policy.prompts]
    for turn, text in enumerate(seen):
        for number in range(turn):
            kept = number >= turn - 2
            assert (f"out {number}.3" in text) == kept, (turn, number)
            assert f"turn {number} {BASH}<|im_end|>" in text  # sampled text stays
        assert text.count("(this output was left out, because it is old: 20 lines)") == max(turn - 2, 0)
        assert text.count("<|im_start|>user") == turn + 1
    assert [turn.kept_context is None for turn in got.turns] == [True, True, True, False, False, False, False]


async def test_each_sampled_token_trains_once_under_the_context_that_it_was_sampled_in() -> None:
    policy = Recorder(script(7))
    got = await play(policy, outputs(6), keep_observations=2)
    samples = to_samples(got, 1.0)
    assert len(samples) == 5
    assert sum(sum(sample.loss_mask) for sample in samples) == got.num_sampled_tokens
    trained = [(s.turn_ids[i], s.input_ids[i]) for s in samples for i, m in enumerate(s.loss_mask) if m]
    assert trained == [(n, token) for n, turn in enumerate(got.turns) for token in turn.completion.token_ids]
    for sample in samples:
        for index in range(len(got.turns)):
            if index in sample.turn_ids:
                start = sample.turn_ids.index(index)
                assert sample.input_ids[:start] == policy.prompts[index]


async def test_nothing_is_left_out_before_the_context_is_long() -> None:
    policy = Recorder(script(9))
    got = await play(policy, outputs(8), keep_observations=1, drop_from_tokens=1000)
    first = next(i for i, turn in enumerate(got.turns) if turn.kept_context is not None)
    assert len(policy.prompts[first - 1]) <= 1000
    everything = sum(len(turn.context_ids) for turn in (await play(Recorder(script(9)), outputs(8))).turns)
    assert len(policy.prompts[-1]) < everything
    assert len(to_samples(got, 1.0)) < 9 - first + 1  # a shortened context grows again for a while


async def test_short_observations_stay_because_a_note_is_longer() -> None:
    got = await play(Recorder(script(5)), ["ok"] * 4, keep_observations=1)
    assert [turn.kept_context for turn in got.turns] == [None] * 5


async def test_dropping_lets_an_episode_go_on_that_would_not_fit() -> None:
    changes = {"max_context_tokens": 2000}
    full = await play(Recorder(script(9)), outputs(8), **changes)
    assert full.stop_reason is StopReason.CONTEXT_LIMIT
    assert (await play(Recorder(script(9)), outputs(8), keep_observations=2, **changes)).stop_reason is (
        StopReason.SUBMITTED
    )


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("split", [1, 4, 6])
async def test_an_episode_that_goes_on_is_the_one_that_never_stopped(keep: int, split: int) -> None:
    whole = await play(Recorder(script(7)), outputs(6), keep_observations=keep, remind_turns=30)
    texts = script(7)
    first = replace(whole, turns=whole.turns[:split])
    policy = Recorder(lambda session, turn: texts[split + turn])
    rest = await play(policy, outputs(6)[split:], earlier=first, keep_observations=keep, remind_turns=30)
    assert rest.turns == whole.turns
    assert rest.stop_reason is StopReason.SUBMITTED
    assert policy.seeds == {("t/0", n): split + n for n in range(7 - split)}


async def test_turns_of_other_limits_are_refused() -> None:
    whole = await play(Recorder(script(7)), outputs(6))
    with pytest.raises(InvariantError, match="turn 3 has another context"):
        Context.after(RENDERER, limits(keep_observations=2), whole.turns)


async def test_going_on_spends_the_same_budget() -> None:
    first = await play(Recorder(script(9)), outputs(3), max_turns=3)
    assert first.stop_reason is StopReason.MAX_TURNS
    again = await play(Recorder(script(9)), outputs(3), earlier=first, max_turns=3)
    assert (again.stop_reason, len(again.turns)) == (StopReason.MAX_TURNS, 3)
    errors = await play(Recorder(["hm"] * 9), outputs(3), max_turns=2)
    rest = await play(Recorder(["hm"] * 9), outputs(3), earlier=errors, max_format_errors=3)
    assert (rest.stop_reason, len(rest.turns)) == (StopReason.NO_TOOL_CALL, 3)
