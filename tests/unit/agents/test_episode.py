"""The episode loop with a scripted policy: every ending, exact tokens, budgets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swe_rl.agents.episode import run_episode
from swe_rl.agents.formats import FORMATS
from swe_rl.agents.rendering import ChatRenderer
from swe_rl.config import AgentConfig
from swe_rl.errors import EngineError, InvariantError, SandboxError
from swe_rl.protocols import EnvStep
from swe_rl.testing import ByteTokenizer, FakeEnvironment, ScriptedPolicy, make_task, scripted_logprob
from swe_rl.types import Completion, StopReason, Trajectory

XML = FORMATS["xml"]
BASH = XML.render("bash", {"command": "ls"})
SUBMIT = XML.render("submit", {})
DONE = EnvStep(observation="", done=True, stop_reason="submitted")
RENDERER = ChatRenderer(ByteTokenizer())


def limits(**changes: Any) -> AgentConfig:
    return AgentConfig(**{"max_context_tokens": 4096, "max_turn_tokens": 200, "max_observation_tokens": 100, **changes})


async def play(policy: Any, env: FakeEnvironment, **changes: Any) -> Trajectory:
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
        seeds=lambda turn: 100 + turn,
        temperature=0.7,
    )


async def test_submitted_keeps_the_sampled_ids_and_only_added_context() -> None:
    policy = ScriptedPolicy([f"look {BASH}", SUBMIT])
    env = FakeEnvironment([EnvStep(observation="a.py"), DONE])
    got = await play(policy, env)
    tokenizer = ByteTokenizer()
    assert got.stop_reason is StopReason.SUBMITTED
    assert tokenizer.decode(got.token_ids) == (
        "<|im_start|>user\nfix it<|im_end|>\n<|im_start|>assistant\n"
        f"look {BASH}<|im_end|>\n<|im_start|>user\na.py<|im_end|>\n<|im_start|>assistant\n{SUBMIT}<|im_end|>"
    )
    assert [turn.observation for turn in got.turns] == ["a.py", ""]
    assert [call.name for call in env.calls] == ["bash", "submit"]
    assert env.calls[0].arguments == {"command": "ls"}
    for turn in got.turns:
        assert turn.completion.rollout_logprobs == [scripted_logprob(i) for i in turn.completion.token_ids]
    assert policy.seeds == {("t/0", 0): 100, ("t/0", 1): 101}
    assert policy.released == ["t/0"]
    assert got.temperature == 0.7
    assert got.reward is None
    assert got.patch is None
    assert set(got.timings_s) == {"policy", "environment", "episode"}


async def test_length_cut_closes_the_message_in_the_context() -> None:
    got = await play(ScriptedPolicy(["x" * 50, SUBMIT]), FakeEnvironment([DONE]), max_turn_tokens=40)
    assert got.turns[0].completion.finish_reason == "length"
    assert len(got.turns[0].completion.token_ids) == 40
    assert got.turns[1].context_ids[0] == RENDERER.end_id
    assert got.turns[0].format_error
    assert not got.turns[1].format_error
    assert got.stop_reason is StopReason.SUBMITTED


async def test_truncated_call_is_not_executed() -> None:
    env = FakeEnvironment([DONE])
    got = await play(ScriptedPolicy([BASH, SUBMIT]), env, max_turn_tokens=len(BASH) - 1)
    assert [call.name for call in env.calls] == ["submit"]
    assert got.turns[0].tool_call is None
    assert "not closed" in got.turns[0].observation


@pytest.mark.parametrize(
    ("script", "changes", "want", "num_turns"),
    [
        ([BASH] * 9, {"max_turns": 3}, StopReason.MAX_TURNS, 3),
        (["hm"] * 9, {"max_format_errors": 2}, StopReason.NO_TOOL_CALL, 2),
        (["hm", "<function=>"], {"max_format_errors": 2}, StopReason.FORMAT_ERROR, 2),
        ([BASH] * 9, {"max_context_tokens": 275, "max_turn_tokens": 100}, StopReason.CONTEXT_LIMIT, None),
        (["x" * 500], {"max_context_tokens": 200, "max_turn_tokens": 190}, StopReason.MAX_TOKENS, 1),
        ([BASH], {"max_context_tokens": 20, "max_turn_tokens": 10}, StopReason.PROMPT_TOO_LONG, 0),
        ([EngineError("gone")], {}, StopReason.INFRA_ERROR, 0),
    ],
)
async def test_endings(script: list[Any], changes: dict[str, Any], want: StopReason, num_turns: int | None) -> None:
    policy = ScriptedPolicy(script)
    got = await play(policy, FakeEnvironment([EnvStep(observation="a.py")]), **changes)
    assert got.stop_reason is want, got.detail
    assert num_turns is None or len(got.turns) == num_turns
    assert len(got.token_ids) <= limits(**changes).max_context_tokens
    assert policy.released == ["t/0"]


async def test_format_errors_count_in_a_row_only() -> None:
    script = ["hm", "hm", BASH, "hm", "hm", SUBMIT]
    env = FakeEnvironment([EnvStep(observation="a"), DONE])
    got = await play(ScriptedPolicy(script), env, max_format_errors=3)
    assert got.stop_reason is StopReason.SUBMITTED
    assert [turn.format_error for turn in got.turns] == [True, True, False, True, True, False]
    assert got.turns[0].observation.startswith("format error: no function call; ")


async def test_submit_in_the_last_turn_counts() -> None:
    got = await play(ScriptedPolicy([SUBMIT]), FakeEnvironment([DONE]), max_turns=1)
    assert got.stop_reason is StopReason.SUBMITTED


async def test_sandbox_trouble_keeps_the_turns() -> None:
    env = FakeEnvironment([EnvStep(observation="a"), SandboxError("node gone")])
    got = await play(ScriptedPolicy([BASH, BASH]), env)
    assert got.stop_reason is StopReason.INFRA_ERROR
    assert got.detail == "SandboxError('node gone')"
    assert len(got.turns) == 2
    assert got.turns[1].observation == ""


async def test_environment_says_why_it_ended() -> None:
    env = FakeEnvironment([EnvStep(observation="gone", done=True, stop_reason="env_killed")])
    got = await play(ScriptedPolicy([BASH]), env)
    assert got.stop_reason is StopReason.ENV_KILLED


@pytest.mark.parametrize(("slow", "want"), [("policy", StopReason.TIMEOUT), ("env", StopReason.ENV_TIMEOUT)])
async def test_wall_clock(slow: str, want: StopReason) -> None:
    policy = ScriptedPolicy([BASH] * 9, delay_s=5.0 if slow == "policy" else 0.0)
    env = FakeEnvironment([EnvStep(observation="a")], delay_s=5.0 if slow == "env" else 0.0)
    got = await play(policy, env, episode_s=0.05)
    assert got.stop_reason is want
    assert got.timings_s["episode"] < 1.0
    assert policy.released == ["t/0"]


async def test_cancellation_passes_through_and_releases() -> None:
    policy = ScriptedPolicy([BASH], delay_s=5.0)
    task = asyncio.create_task(play(policy, FakeEnvironment([DONE])))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert policy.released == ["t/0"]


async def test_long_observation_is_cut_by_tokens() -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    env = FakeEnvironment([EnvStep(observation=text), DONE])
    got = await play(ScriptedPolicy([BASH, SUBMIT]), env, max_observation_tokens=60)
    seen = got.turns[0].observation
    assert len(RENDERER.plain(seen)) <= 60
    assert seen.startswith("line 0\n")
    assert seen.endswith("line 99\n")
    assert "tokens cut]" in seen


class Broken(ScriptedPolicy):
    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        good = await super().generate(*args, **kwargs)
        return Completion(
            token_ids=good.token_ids,
            rollout_logprobs=good.rollout_logprobs[:-1],
            finish_reason="stop",
            policy_version=0,
            policy_version_max=0,
        )


class Dead(ScriptedPolicy):
    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        raise EngineError("dead")

    async def release(self, session: str) -> None:
        raise EngineError("dead")


async def test_a_dead_engine_is_infrastructure() -> None:
    got = await play(Dead([]), FakeEnvironment([DONE]))
    assert got.stop_reason is StopReason.INFRA_ERROR
    assert got.detail == "EngineError('dead')"


async def test_missing_logprob_stops_the_run() -> None:
    policy = Broken([BASH])
    with pytest.raises(InvariantError):
        await play(policy, FakeEnvironment([DONE]))
    assert policy.released == ["t/0"]
