"""What every engine promises, over the embedded one and vLLM: tokens, logprobs, sessions, limits, weights, parity."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import engines
import parity_faults
import pytest
import pytest_asyncio
import torch
from engines import MAX_CONTEXT, STOP, VOCAB, Pair

from swe_rl.errors import EngineError, InvariantError
from swe_rl.protocols import SamplingParams
from swe_rl.training.parity import compare, probe_lengths, sample_probe
from swe_rl.training.weight_sync import publish
from swe_rl.types import Completion

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
PROMPT = [(7 * i + 3) % VOCAB for i in range(40)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["embedded", "vllm"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with engines.open_pair(request.param) as opened:
        yield opened


def params(*, seed: int = 0, temperature: float = 1.0, max_new_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, stop_ids=STOP, seed=seed)


def check(got: Completion, limit: int) -> None:
    assert 1 <= len(got.token_ids) <= limit
    assert len(got.rollout_logprobs) == len(got.token_ids)
    assert all(isinstance(i, int) and 0 <= i < VOCAB for i in got.token_ids)
    assert all(math.isfinite(p) and p <= 0 for p in got.rollout_logprobs)
    assert not set(got.token_ids[:-1]) & set(STOP)
    assert (got.finish_reason == "stop") == (got.token_ids[-1] in STOP)
    assert got.finish_reason == "stop" or len(got.token_ids) == limit


def logits_after(pair: Pair, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), V] by plain transformers, the whole sequence at once."""
    model = pair.backend.model
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
            return logits
    finally:
        model.config._attn_implementation = before


def reference(pair: Pair, prompt: Sequence[int], got: Completion, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature) of what was sampled."""
    logits = logits_after(pair, [*prompt, *got.token_ids])[len(prompt) - 1 : -1]
    return torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, torch.tensor(got.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("limit", [1, 7, 64])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
async def test_completion_is_well_formed_and_its_logprobs_are_the_models(
    pair: Pair, limit: int, temperature: float
) -> None:
    got = await pair.engine.generate(PROMPT, params(temperature=temperature, max_new_tokens=limit), session="s")
    await pair.engine.release("s")
    check(got, limit)
    assert got.policy_version == got.policy_version_max == pair.engine.policy_version
    want = reference(pair, PROMPT, got, temperature)
    assert float((want - torch.tensor(got.rollout_logprobs)).abs().max()) <= 1e-3


async def test_samples_follow_the_distribution(pair: Pair) -> None:
    """First tokens of many seeds, chi-square against the model's own probabilities in bins of at least 5 expected."""
    got = await asyncio.gather(
        *(pair.engine.generate(PROMPT, params(seed=i, max_new_tokens=1), session=f"d{i}") for i in range(400))
    )
    for i in range(400):
        await pair.engine.release(f"d{i}")
    probabilities = logits_after(pair, PROMPT)[-1].softmax(-1).tolist()
    assert len({c.token_ids[0] for c in got}) > 20
    counts = [sum(c.token_ids[0] == v for c in got) for v in range(VOCAB)]
    big = [v for v in range(VOCAB) if 400 * probabilities[v] >= 5]
    rest = 400 - sum(counts[v] for v in big), 400 * (1 - sum(probabilities[v] for v in big))
    cells = [(counts[v], 400 * probabilities[v]) for v in big] + [rest]
    statistic = sum((seen - expected) ** 2 / max(expected, 1e-9) for seen, expected in cells)
    assert statistic < len(cells) + 5 * math.sqrt(2 * len(cells))  # five standard deviations; the seeds are fixed


async def test_equal_seeds_give_equal_tokens_whoever_else_runs(pair: Pair) -> None:
    async def play(name: str, seed: int) -> list[Completion]:
        ids, found = list(PROMPT), []
        for turn in range(3):
            found.append(await pair.engine.generate(ids, params(seed=10 * seed + turn), session=name))
            ids += [*found[-1].token_ids, 10]
        await pair.engine.release(name)
        return found

    alone = await play("alone", 1)
    crowd = await asyncio.gather(*(play(f"c{seed}", seed) for seed in range(9)))
    assert [c.token_ids for c in crowd[1]] == [c.token_ids for c in alone]
    for a, b in zip(crowd[1], alone, strict=True):  # exact in the embedded engine, rounded otherwise in vLLM's batches
        assert a.rollout_logprobs == pytest.approx(b.rollout_logprobs, abs=1e-3)
    assert len({tuple(c[0].token_ids) for c in crowd}) > 5


async def test_the_context_ends_a_turn(pair: Pair) -> None:
    prompt = [i % 200 for i in range(MAX_CONTEXT - 5)]
    got = await pair.engine.generate(prompt, params(seed=3, max_new_tokens=50), session="full")
    await pair.engine.release("full")
    check(got, 5)


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [1] * MAX_CONTEXT])
async def test_a_prompt_that_cannot_run_is_refused_and_harms_nobody(pair: Pair, prompt: list[int]) -> None:
    with pytest.raises(EngineError):
        await pair.engine.generate(prompt, params(), session="bad")
    check(await pair.engine.generate(PROMPT, params(), session="good"), 24)
    await pair.engine.release("good")


async def test_a_session_has_one_request_at_a_time(pair: Pair) -> None:
    first = asyncio.create_task(pair.engine.generate(PROMPT, params(max_new_tokens=60), session="twice"))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="already has a request"):
        await pair.engine.generate(PROMPT, params(), session="twice")
    check(await first, 60)
    await pair.engine.release("twice")


async def test_cancelling_a_request_harms_nobody(pair: Pair) -> None:
    want = await pair.engine.generate(PROMPT, params(seed=5), session="before")
    endless = replace(params(max_new_tokens=400), stop_ids=())
    task = asyncio.create_task(pair.engine.generate(PROMPT, endless, session="gone"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await pair.engine.release("gone")
    after = await pair.engine.generate(PROMPT, params(seed=5), session="after")
    assert after.token_ids == want.token_ids
    for name in ("before", "after"):
        await pair.engine.release(name)


async def test_releasing_a_running_session_ends_it_as_cancelled(pair: Pair) -> None:
    task = asyncio.create_task(pair.engine.generate(PROMPT, params(seed=1, max_new_tokens=460), session="left"))
    await asyncio.sleep(0.2)
    for _ in range(2):
        await pair.engine.release("left")
    await pair.engine.release("never seen")
    got = await asyncio.wait_for(task, timeout=30)
    assert got.finish_reason in ("cancelled", "stop")
    assert len(got.token_ids) == len(got.rollout_logprobs) < 460


async def test_trainer_and_engine_agree_at_every_length(pair: Pair) -> None:
    lengths = probe_lengths(pair.contract)
    assert lengths["short"] < lengths["middle"] < pair.contract.original_context < lengths["long"]
    report = compare(
        await sample_probe(pair.engine, pair.contract, nonce=1), pair.contract, score=pair.backend.logprobs
    )
    assert report.ok, report.describe()
    assert max(report.means.values()) <= 1e-3


async def test_new_weights_are_in_use_after_the_update_and_old_blocks_are_not(pair: Pair) -> None:
    """Prompts that were cached under the old weights get the new weights' logprobs, to the end of a long prompt."""
    prompt = [(11 * i + 5) % VOCAB for i in range(200)]
    before = await pair.engine.generate(prompt, params(temperature=0.0, max_new_tokens=8), session="old")
    version = pair.engine.policy_version
    generator = torch.Generator().manual_seed(version + 9)
    with torch.no_grad():
        for tensor in pair.backend.masters.params.values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    pair.backend.policy_version = version + 1
    await publish(pair.backend, pair.engine)
    after = await pair.engine.generate(prompt, params(temperature=0.0, max_new_tokens=8), session="old")
    await pair.engine.release("old")
    assert after.policy_version == after.policy_version_max == pair.engine.policy_version == version + 1
    assert after.rollout_logprobs != before.rollout_logprobs
    want = reference(pair, prompt, after, 0.0)
    assert float((want - torch.tensor(after.rollout_logprobs)).abs().max()) <= 1e-3


async def test_an_update_in_the_middle_of_a_turn_is_told_by_its_versions(pair: Pair) -> None:
    task = asyncio.create_task(pair.engine.generate(PROMPT, params(seed=8, max_new_tokens=450), session="long"))
    await asyncio.sleep(0.3)
    version = pair.engine.policy_version
    pair.backend.policy_version = version + 1
    await publish(pair.backend, pair.engine)
    got = await task
    await pair.engine.release("long")
    if got.finish_reason == "length":  # else it met the stop id before the update
        assert (got.policy_version, got.policy_version_max) == (version, version + 1)
    want = reference(pair, PROMPT, got, 1.0)  # equal weights: all logprobs fit, recomputed or not
    assert float((want - torch.tensor(got.rollout_logprobs)).abs().max()) <= 2e-3


async def test_weights_of_another_model_are_refused_before_anything_changes(pair: Pair) -> None:
    weights = dict(pair.backend.weights())
    name, tensor = weights.popitem()
    for wrong in (weights, {**weights, name: tensor, "other": tensor}, {**weights, name: tensor[..., :1]}):
        with pytest.raises(EngineError, match="weight update"):
            await pair.engine.update_weights(wrong, version=77)
    got = await pair.engine.generate(PROMPT, params(), session="s")
    await pair.engine.release("s")
    assert got.policy_version == pair.engine.policy_version != 77


async def test_counters_count(pair: Pair) -> None:
    before = pair.engine.counters.as_dict()
    got = await pair.engine.generate(PROMPT, params(seed=2), session="n")
    await pair.engine.release("n")
    after = pair.engine.counters.as_dict()
    assert after["tokens_sampled"] - before["tokens_sampled"] == len(got.token_ids)


@pytest.mark.parametrize("fault", [*parity_faults.ONLY_VLLM, *parity_faults.ONLY_EMBEDDED, *parity_faults.FAULTS])
async def test_the_probe_tells_each_fault_and_is_silent_again_without_it(pair: Pair, fault: str) -> None:
    embedded = type(pair.engine).__name__ == "EmbeddedEngine"
    only_here = parity_faults.ONLY_EMBEDDED if embedded else parity_faults.ONLY_VLLM
    cases = {**only_here, **parity_faults.FAULTS}
    if fault not in cases:
        return  # there is no such thing in this engine
    inject, words = cases[fault]
    report = await inject(pair)
    assert not report.ok, f"{fault}: {report.describe()}"
    assert words in report.causes[0], f"{fault}: {report.describe()}"
    with pytest.raises(InvariantError, match="likely causes, in order: 1"):
        report.require()
    if embedded or fault != "dropped YaRN":  # which is the last one, as vLLM has to be started again for it
        again = await parity_faults.probe(pair, nonce=5)
        assert again.ok, again.describe()
