"""Ends of requests, cancellation, weight updates, more sessions than slots, and errors of the embedded engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swe_rl.config import EngineConfig
from swe_rl.errors import ConfigError, EngineDead, EngineError, InvariantError
from swe_rl.inference import EmbeddedEngine
from swe_rl.protocols import SamplingParams

PROMPT = [3, 1, 4, 1, 5]
CFG = EngineConfig(num_slots=2, prefill_chunk=16)


def _params(n: int = 8, *, stop: tuple[int, ...] = (), seed: int = 0) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, stop_ids=stop, seed=seed)


def _weights(model: Any, scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: p.detach() * scale for name, p in model.named_parameters()}


async def _wait_for_tokens(engine: EmbeddedEngine, n: int) -> None:
    while engine.counters.tokens_sampled < n:
        await asyncio.sleep(0.001)


async def test_finish_reasons(model: Any) -> None:
    async with EmbeddedEngine(model, CFG, max_context=40) as engine:
        free = await engine.generate(PROMPT, _params(6), session="a")
        assert (len(free.token_ids), free.finish_reason) == (6, "length")
        stop = free.token_ids[3]
        stopped = await engine.generate(PROMPT, _params(6, stop=(stop,)), session="b")
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
        full = await engine.generate(PROMPT, _params(1000), session="c")
        assert (len(full.token_ids), full.finish_reason) == (40 - len(PROMPT), "length")


async def test_same_prompt_again_and_changed_prefix(model: Any) -> None:
    async with EmbeddedEngine(model, CFG, max_context=64) as engine:
        first = await engine.generate(PROMPT, _params(), session="a")
        assert await engine.generate(PROMPT, _params(), session="a") == first
        changed = [3, 1, 9, *PROMPT]
        got = await engine.generate(changed, _params(), session="a")
        assert engine.counters.prefix_breaks == 2
        assert got == await engine.generate(changed, _params(), session="fresh")


async def test_more_sessions_than_slots_all_finish(model: Any, play: Any) -> None:
    async with EmbeddedEngine(model, CFG, max_context=300) as engine:
        episodes = await asyncio.wait_for(asyncio.gather(*(play(engine, i, pause_s=0.005) for i in range(12))), 60)
    assert all(e.logprobs for e in episodes)


async def test_sessions_that_are_never_released_do_not_block(model: Any) -> None:
    async with EmbeddedEngine(model, CFG, max_context=64) as engine:
        for i in range(7):
            await asyncio.wait_for(engine.generate([i, 2, 3], _params(3), session=f"leak-{i}"), 30)
        assert engine.counters.preemptions == 5


async def test_cancelled_task_frees_the_engine(model: Any) -> None:
    cfg = EngineConfig(num_slots=1)
    async with EmbeddedEngine(model, cfg, max_context=4096) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, _params(100_000), session="a"))
        await _wait_for_tokens(engine, 5)
        waiting = asyncio.create_task(engine.generate(PROMPT, _params(100_000), session="waits"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        task.cancel()
        for cancelled in (task, waiting):
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        await engine.release("a")
        await engine.release("a")
        other = await asyncio.wait_for(engine.generate(PROMPT, _params(4), session="b"), 30)
        assert len(other.token_ids) == 4


async def test_release_ends_a_running_request_as_cancelled(model: Any) -> None:
    async with EmbeddedEngine(model, CFG, max_context=4096) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, _params(100_000), session="a"))
        await _wait_for_tokens(engine, 5)
        await engine.release("a")
        completion = await asyncio.wait_for(task, 30)
        assert completion.finish_reason == "cancelled"
        assert len(completion.token_ids) == len(completion.rollout_logprobs) >= 5


async def test_new_weights_never_meet_old_keys(model: Any) -> None:
    async with EmbeddedEngine(model, CFG, max_context=64) as engine:
        first = await engine.generate(PROMPT, _params(), session="a")
        await engine.update_weights(_weights(model, 1.3), version=4)
        assert engine.policy_version == 4
        prompt = [*PROMPT, *first.token_ids, 8, 8]
        second = await engine.generate(prompt, _params(seed=1), session="a")
        assert (first.policy_version, second.policy_version, second.policy_version_max) == (0, 4, 4)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.3)
    async with EmbeddedEngine(model, CFG, max_context=64, policy_version=4) as engine:
        assert await engine.generate(prompt, _params(seed=1), session="a") == second


async def test_update_in_the_middle_of_a_turn_recomputes_and_goes_on(model: Any) -> None:
    async with EmbeddedEngine(model, CFG, max_context=2048) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, _params(400), session="a"))
        await _wait_for_tokens(engine, 10)
        await engine.update_weights(_weights(model, 0.5), version=1)
        completion = await asyncio.wait_for(task, 60)
        assert (completion.policy_version, completion.policy_version_max) == (0, 1)
        assert len(completion.token_ids) == 400
        assert engine.counters.recomputed > 0
    ids = [*PROMPT, *completion.token_ids]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        want = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)[len(ids) - 2, ids[-1]]
    assert abs(float(want) - completion.rollout_logprobs[-1]) < 1e-4


async def test_update_with_wrong_names_or_shapes_is_an_error(model: Any) -> None:
    async with EmbeddedEngine(model, CFG, max_context=64) as engine:
        weights = _weights(model)
        with pytest.raises(EngineError, match="missing"):
            await engine.update_weights({}, version=1)
        with pytest.raises(EngineError, match="unknown"):
            await engine.update_weights({**weights, "extra": torch.zeros(1)}, version=1)
        with pytest.raises(EngineError, match="shape"):
            await engine.update_weights({**weights, "model.norm.weight": torch.zeros(1)}, version=1)
        assert engine.policy_version == 0
        await engine.update_weights({**weights, "lm_head.weight": model.lm_head.weight.detach()}, version=2)
        assert engine.policy_version == 2


async def test_engine_copies_the_weights(model: Any) -> None:
    async with EmbeddedEngine(model, CFG, max_context=64) as engine:
        before = await engine.generate(PROMPT, _params(), session="a")
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert await engine.generate(PROMPT, _params(), session="b") == before


@pytest.mark.parametrize("prompt", [[], [0, 211], [-1], list(range(64))])
async def test_bad_prompts_are_engine_errors(model: Any, prompt: list[int]) -> None:
    async with EmbeddedEngine(model, CFG, max_context=64) as engine:
        with pytest.raises(EngineError):
            await engine.generate(prompt, _params(), session="a")
        assert len((await engine.generate(PROMPT, _params(3), session="a")).token_ids) == 3


async def test_one_request_per_session(model: Any) -> None:
    async with EmbeddedEngine(model, CFG, max_context=4096) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, _params(100_000), session="a"))
        await _wait_for_tokens(engine, 2)
        with pytest.raises(EngineError, match="already"):
            await engine.generate(PROMPT, _params(), session="a")
        await engine.release("a")
        await task


async def test_non_finite_logprobs_stop_the_run(model: Any) -> None:
    async with EmbeddedEngine(model, CFG, max_context=64) as engine:
        await engine.update_weights(_weights(model, float("nan")), version=1)
        with pytest.raises(InvariantError, match="non-finite"):
            await engine.generate(PROMPT, _params(), session="a")
        with pytest.raises(EngineDead, match="failed"):
            await engine.generate(PROMPT, _params(), session="a")
        await engine.release("a")


async def test_foreign_failure_while_loading_reaches_every_waiter(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may hang: not the update, not a request that runs, not what is queued behind the update."""

    def load(weights: object, version: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    async with EmbeddedEngine(model, CFG, max_context=4096) as engine:
        running = asyncio.create_task(engine.generate(PROMPT, _params(100_000), session="a"))
        await _wait_for_tokens(engine, 2)
        monkeypatch.setattr(engine._scheduler, "load_weights", load)
        work = [asyncio.create_task(engine.update_weights({}, version=n)) for n in (1, 2)]
        work.append(asyncio.create_task(engine.generate(PROMPT, _params(), session="b")))
        done = await asyncio.wait_for(asyncio.gather(running, *work, return_exceptions=True), 30)
        assert [type(item) for item in done] == [EngineDead] * 4
        assert all("out of memory" in str(item) for item in done)
        with pytest.raises(EngineDead):
            await engine.update_weights({}, version=3)
        await engine.release("a")


async def test_failure_in_a_step_is_the_end_of_the_engine(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        raise RuntimeError("device lost")

    async with EmbeddedEngine(model, CFG, max_context=64) as engine:
        monkeypatch.setattr(engine._scheduler, "step", step)
        for _ in range(2):
            with pytest.raises(EngineDead, match="device lost"):
                await engine.generate(PROMPT, _params(), session="a")


async def test_close_fails_what_runs_and_is_idempotent(model: Any) -> None:
    engine = EmbeddedEngine(model, CFG, max_context=4096)
    task = asyncio.create_task(engine.generate(PROMPT, _params(100_000), session="a"))
    await _wait_for_tokens(engine, 2)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    with pytest.raises(EngineError):
        await engine.generate(PROMPT, _params(), session="a")
    await engine.release("a")


def test_bad_configuration(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine\.dtype"):
        EmbeddedEngine(model, EngineConfig(dtype="int8"), max_context=64)
    with pytest.raises(ConfigError, match=r"engine\.num_slots"):
        EmbeddedEngine(model, EngineConfig(num_slots=0), max_context=64)
