"""What every Policy promises, over the scripted one and the embedded engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from swe_rl.agents import FORMATS, ChatRenderer, run_episode
from swe_rl.config import AgentConfig, EngineConfig, ModelConfig
from swe_rl.protocols import EnvStep, Policy, SamplingParams
from swe_rl.testing import ByteTokenizer, FakeEnvironment, ScriptedPolicy, make_task
from swe_rl.types import Completion

VOCAB = 260
STOP = (258,)
PROMPT = [257, 104, 105, 10]


@pytest.fixture(params=["scripted", "embedded"])
async def policy(request: pytest.FixtureRequest) -> AsyncIterator[Policy]:
    if request.param == "scripted":
        yield ScriptedPolicy(lambda session, turn: f"turn {turn} " * 3, version=0)
        return
    from swe_rl.inference import EmbeddedEngine
    from swe_rl.models.nano import build_model

    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 48}
    model = build_model(ModelConfig(vocab_size=VOCAB, init_seed=1, **sizes))
    async with EmbeddedEngine(model, EngineConfig(num_slots=4, prefill_chunk=16), max_context=512) as engine:
        yield engine


def params(*, seed: int = 0, temperature: float = 1.0, max_new_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, stop_ids=STOP, seed=seed)


def check(completion: Completion, limit: int) -> None:
    ids = completion.token_ids
    assert 1 <= len(ids) <= limit
    assert len(completion.rollout_logprobs) == len(ids)
    assert all(isinstance(i, int) and 0 <= i < VOCAB for i in ids)
    assert all(math.isfinite(p) and p <= 0 for p in completion.rollout_logprobs)
    assert not set(ids[:-1]) & set(STOP)
    assert (completion.finish_reason == "stop") == (ids[-1] in STOP)
    assert completion.finish_reason == "stop" or len(ids) == limit
    assert completion.policy_version == completion.policy_version_max == 0


@pytest.mark.parametrize("limit", [1, 7, 64])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
async def test_completion_is_well_formed(policy: Policy, limit: int, temperature: float) -> None:
    got = await policy.generate(PROMPT, params(temperature=temperature, max_new_tokens=limit), session="s")
    check(got, limit)
    await policy.release("s")


async def test_a_session_continues_with_the_ids_it_returned(policy: Policy) -> None:
    ids = list(PROMPT)
    for turn in range(4):
        got = await policy.generate(ids, params(seed=turn), session="s")
        check(got, 24)
        ids += [*got.token_ids, 10, 97 + turn]
    await policy.release("s")


async def test_equal_seeds_give_equal_results_whoever_else_runs(policy: Policy) -> None:
    async def play(name: str, seed: int) -> list[Completion]:
        ids, found = list(PROMPT), []
        for turn in range(3):
            found.append(await policy.generate(ids, params(seed=10 * seed + turn), session=name))
            ids += [*found[-1].token_ids, 10]
        await policy.release(name)
        return found

    alone = await play("alone", 1)
    crowd = await asyncio.gather(*(play(f"c{seed}", seed) for seed in range(9)))
    assert crowd[1] == alone


async def test_release_is_idempotent_and_frees_the_name(policy: Policy) -> None:
    first = await policy.generate(PROMPT, params(), session="s")
    for _ in range(2):
        await policy.release("s")
    await policy.release("never seen")
    assert await policy.generate(PROMPT, params(), session="s") == first
    await policy.release("s")


async def test_cancelling_a_request_harms_nobody(policy: Policy) -> None:
    want = await policy.generate(PROMPT, params(seed=5), session="before")
    task = asyncio.create_task(policy.generate(PROMPT, params(max_new_tokens=400), session="gone"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await policy.release("gone")
    assert await policy.generate(PROMPT, params(seed=5), session="after") == want


async def test_an_episode_runs_on_it(policy: Policy) -> None:
    renderer = ChatRenderer(ByteTokenizer())
    got = await run_episode(
        make_task(),
        FakeEnvironment([EnvStep(observation="ok")]),
        policy,
        renderer=renderer,
        action_format=FORMATS["xml"],
        limits=AgentConfig(max_turns=3, max_context_tokens=480, max_turn_tokens=20, max_format_errors=9),
        trajectory_id="t",
        group_id="g",
        rollout_index=0,
        seeds=lambda turn: turn,
    )
    assert got.stop_reason == "max_turns"
    assert len(got.turns) == 3
    for turn in got.turns:
        check(turn.completion, 20)
