"""A replica that accepts and never answers is known in seconds, long before `stall_s`; one that is slow is left."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from real_parts import require
from vllm_fakes import STOP, VOCAB, WEIGHTS, FakeReplica, fake_engine
from vllm_servers import FakeServer

from swe_rl.inference.vllm import engine as engine_module
from swe_rl.inference.vllm import fleet as fleet_module
from swe_rl.inference.vllm import health
from swe_rl.inference.vllm import server as server_module
from swe_rl.inference.vllm.engine import VllmEngine
from swe_rl.inference.vllm.replica import ReplicaStalled
from swe_rl.inference.vllm.server import ServerReplica
from swe_rl.protocols import SamplingParams
from swe_rl.types import Completion

PARAMS = SamplingParams(max_new_tokens=20, stop_ids=(STOP,), seed=0)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WATCH_S", 0.01)
    monkeypatch.setattr(fleet_module, "RETRY_S", 0.0)
    monkeypatch.setattr(server_module, "POLL_S", 0.02)
    monkeypatch.setattr(health, "QUIET_S", 0.05)
    monkeypatch.setattr(health, "HEALTH_S", 0.3)


@asynccontextmanager
async def engine_of(*servers: FakeServer) -> AsyncIterator[VllmEngine]:
    require(importlib.util.find_spec("aiohttp") is not None, "package aiohttp")
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        replicas: Any = [ServerReplica(f"server {i}", url=server.url) for i, server in enumerate(servers)]
        engine = await stack.enter_async_context(fake_engine(*replicas, layout="servers"))
        await engine.update_weights(WEIGHTS, version=4)
        yield engine


def check(got: Completion, prompt: list[int]) -> None:
    assert got.token_ids == [(len(prompt) + i) % VOCAB for i in range(20)]
    assert got.rollout_logprobs == [-0.01 * token for token in got.token_ids]
    assert (got.finish_reason, got.policy_version, got.policy_version_max) == ("length", 4, 4)


async def test_sessions_of_a_server_that_hangs_go_on_at_a_living_one() -> None:
    good, bad = FakeServer(), FakeServer(hang_after=6)
    async with engine_of(good, bad) as engine:
        prompts = [list(range(10, 20 + i)) for i in range(6)]
        turns = [engine.generate(prompt, PARAMS, session=f"s{i}") for i, prompt in enumerate(prompts)]
        found = await asyncio.wait_for(asyncio.gather(*turns), timeout=30)
        for got, prompt in zip(found, prompts, strict=True):
            check(got, prompt)
        assert engine.counters.stalls == engine.counters.restarts == 1
        moved = [body for body in good.requests if body["sampling_params"]["max_tokens"] < 20]
        assert moved, "the rest of turns that had begun"
        assert engine.counters.resubmitted == len(good.requests) - 3
        assert engine.counters.tokens_sampled == 6 * 20
        again = await asyncio.wait_for(engine.generate(prompts[1], PARAMS, session="s1"), timeout=30)
        check(again, prompts[1])
        bad.answering.set()  # it is well again, and used again
        async with asyncio.timeout(30):
            while len(engine.fleet.usable()) < 2:
                await asyncio.sleep(0.02)
        seen = len(bad.requests)
        check(await engine.generate(prompts[0], PARAMS, session="new"), prompts[0])
        assert len(bad.requests) == seen + 1


async def test_a_server_that_hangs_does_not_hold_up_an_update_of_the_weights() -> None:
    good, bad = FakeServer(), FakeServer()
    async with engine_of(good, bad) as engine:
        bad.answering.clear()
        await asyncio.wait_for(engine.update_weights(WEIGHTS, version=5), timeout=30)
        assert (engine.policy_version, good.label, bad.label) == (5, "5", "4")
        assert [place.index for place in engine.fleet.usable()] == [0]
        got = await engine.generate([11, 12], PARAMS, session="s")
        assert got.policy_version == 5
        bad.answering.set()
        async with asyncio.timeout(30):
            while len(engine.fleet.usable()) < 2:
                await asyncio.sleep(0.02)
        assert bad.label == "5"


async def test_a_session_is_released_although_its_server_hangs() -> None:
    bad = FakeServer(hang_after=2)
    async with engine_of(bad) as engine:
        turn = asyncio.create_task(engine.generate([11, 12], PARAMS, session="s"))
        async with asyncio.timeout(30):
            while bad.answering.is_set():
                await asyncio.sleep(0.01)
            await engine.release("s")
            bad.answering.set()  # or nobody would be there to be asked
            got = await turn
        assert (got.finish_reason, got.token_ids) == ("cancelled", [2, 3])


async def test_a_slow_replica_that_answers_is_left() -> None:
    """As one that computes a long prompt: no token for many times QUIET_S."""
    slow = FakeReplica("slow", delay_s=0.4)
    async with fake_engine(slow, FakeReplica("other")) as engine:
        await engine.update_weights(WEIGHTS, version=0)
        got = await engine.generate(list(range(10, 15)), PARAMS, session="s")
        assert got.token_ids == [5, 6, STOP]
        assert engine.counters.restarts == engine.counters.stalls == 0


async def test_one_question_without_an_answer_is_no_loss() -> None:
    class Busy(FakeReplica):
        asked = 0

        async def alive(self) -> bool:
            self.asked += 1
            if self.asked % 2:
                await asyncio.sleep(3600)
            return self.up

    busy = Busy("busy", delay_s=0.5)
    async with fake_engine(busy) as engine:
        await engine.update_weights(WEIGHTS, version=0)
        got = await engine.generate(list(range(10, 15)), PARAMS, session="s")
        assert got.token_ids == [5, 6, STOP]
        assert busy.asked >= 2
        assert engine.counters.restarts == 0


async def test_a_call_that_is_watched_keeps_its_result_and_its_errors() -> None:
    replica = FakeReplica("r")

    async def call(result: Any) -> Any:
        await asyncio.sleep(0.12)
        if isinstance(result, Exception):
            raise result
        return result

    replica.up = True
    assert await health.watched(replica, call(7)) == 7
    with pytest.raises(KeyError):
        await health.watched(replica, call(KeyError("x")))
    replica.up = False
    with pytest.raises(ReplicaStalled, match="r does not answer"):
        await health.watched(replica, call(7))
