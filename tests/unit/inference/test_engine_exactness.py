"""What an episode gets depends on its ids, seeds and weights only; and it is what the trainer computes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swe_rl.config import EngineConfig
from swe_rl.inference import EmbeddedEngine
from swe_rl.models import head_weight, packed_forward
from swe_rl.models.attention import PACKED, register
from swe_rl.protocols import SamplingParams
from swe_rl.types import PackedBatch

CONTEXT = 300


def _same(a: Any, b: Any) -> None:
    """Same ids and bit-equal logprobs."""
    assert a.ids == b.ids
    assert torch.equal(torch.tensor(a.logprobs, dtype=torch.float64), torch.tensor(b.logprobs, dtype=torch.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
async def test_alone_and_among_fifteen_others(model: Any, play: Any, dtype: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cfg = EngineConfig(num_slots=16, prefill_chunk=32, dtype=dtype)
        alone = []
        async with EmbeddedEngine(model, cfg, max_context=CONTEXT) as engine:
            for seed in range(16):
                alone.append(await play(engine, seed))
        async with EmbeddedEngine(model, cfg, max_context=CONTEXT) as engine:
            together = await asyncio.gather(*(play(engine, seed, pause_s=0.01) for seed in reversed(range(16))))
        for a, b in zip(alone, reversed(together), strict=True):
            _same(a, b)
    finally:
        torch.set_num_threads(before)


async def test_any_slot_any_number_of_slots(model: Any, play: Any) -> None:
    results = []
    for num_slots, occupied in [(1, 0), (3, 2), (24, 0), (24, 23), (17, 16)]:
        async with EmbeddedEngine(model, EngineConfig(num_slots=num_slots), max_context=CONTEXT) as engine:
            for other in range(occupied):  # idle sessions hold the low slots
                params = SamplingParams(max_new_tokens=2, stop_ids=(), seed=other)
                await engine.generate([5, other, 9], params, session=f"holder-{other}")
            results.append(await play(engine, 77))
    for result in results[1:]:
        _same(results[0], result)


@pytest.mark.parametrize("num_slots", [1, 3])
async def test_preemption_by_recompute_changes_nothing(
    model: Any, play: Any, play_round_robin: Any, num_slots: int
) -> None:
    async with EmbeddedEngine(model, EngineConfig(num_slots=16), max_context=CONTEXT) as engine:
        roomy = await asyncio.gather(*(play(engine, seed) for seed in range(9)))
        assert engine.counters.preemptions == 0
    async with EmbeddedEngine(model, EngineConfig(num_slots=num_slots), max_context=CONTEXT) as engine:
        tight = await play_round_robin(engine, range(9))
        assert engine.counters.preemptions > 9
        assert engine.counters.recomputed > 0
    for a, b in zip(roomy, tight, strict=True):
        _same(a, b)


async def test_long_neighbours_change_nothing(model: Any) -> None:
    """Contexts on both sides of the attention kernel's block borders, alone and side by side."""
    lengths = [30, 150, 250, 300, 505, 520, 700, 900]

    async def turn(engine: EmbeddedEngine, n: int) -> Any:
        prompt = [(i * n + 3 * i + n) % 211 for i in range(n)]
        return await engine.generate(prompt, SamplingParams(max_new_tokens=14, stop_ids=(), seed=n), session=str(n))

    cfg = EngineConfig(num_slots=8, prefill_chunk=64)
    async with EmbeddedEngine(model, cfg, max_context=1000) as engine:
        together = await asyncio.gather(*(turn(engine, n) for n in lengths))
    for n, completion in zip(lengths, together, strict=True):
        async with EmbeddedEngine(model, cfg, max_context=1000) as engine:
            assert await turn(engine, n) == completion


async def test_a_shared_prompt_is_computed_once(model: Any) -> None:
    prompt = [(13 * i + 5) % 211 for i in range(90)]

    async def first_turn(engine: EmbeddedEngine, i: int) -> Any:
        return await engine.generate(prompt, SamplingParams(max_new_tokens=6, stop_ids=(), seed=i), session=str(i))

    cfg = EngineConfig(num_slots=8, prefill_chunk=16)
    async with EmbeddedEngine(model, cfg, max_context=CONTEXT) as engine:
        group = await asyncio.gather(*(first_turn(engine, i) for i in range(8)))
        assert engine.counters.tokens_computed == 89 + 8 * 6  # the prompt once, then one input per sampled token
        assert engine.counters.tokens_shared == 7 * 89
    for i, completion in enumerate(group):
        async with EmbeddedEngine(model, cfg, max_context=CONTEXT) as engine:
            assert await first_turn(engine, i) == completion


async def test_every_token_is_computed_once(model: Any, play: Any) -> None:
    async with EmbeddedEngine(model, EngineConfig(num_slots=8), max_context=CONTEXT) as engine:
        episodes = await asyncio.gather(*(play(engine, seed, pause_s=0.01) for seed in range(8)))
        computed = engine.counters.tokens_computed
        assert (engine.counters.recomputed, engine.counters.prefix_breaks) == (0, 0)
        assert engine.counters.tokens_sampled == sum(len(e.logprobs) for e in episodes)
    assert computed == sum(len(e.ids) for e in episodes) - 8  # nobody needs the keys of the last token


async def test_greedy_equals_transformers_without_cache(model: Any, play: Any) -> None:
    """Independent reference: fp64, transformers' eager attention, the whole sequence recomputed."""
    async with EmbeddedEngine(model, EngineConfig(num_slots=4, prefill_chunk=16), max_context=CONTEXT) as engine:
        episodes = await asyncio.gather(*(play(engine, seed, temperature=0.0) for seed in range(4)))
    model.double().config._attn_implementation = "eager"
    for episode in episodes:
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([episode.ids])).logits[0], -1)
        for index, got in zip(episode.sampled_at, episode.logprobs, strict=True):
            assert int(logprobs[index - 1].argmax()) == episode.ids[index]
            assert abs(float(logprobs[index - 1, episode.ids[index]]) - got) < 1e-5


def _models() -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    register()
    sizes = {
        "vocab_size": 211,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    torch.manual_seed(11)
    llama = LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=False)
    qwen2 = Qwen2Config(**sizes, num_key_value_heads=4, tie_word_embeddings=True)
    return {
        "llama": LlamaForCausalLM._from_config(llama, attn_implementation=PACKED),
        "qwen2": Qwen2ForCausalLM._from_config(qwen2, attn_implementation=PACKED),
    }


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_the_trainers(model: Any, play: Any, family: str, temperature: float) -> None:
    """Engine against packed_forward and the head, several multi-turn documents in one row: mean |delta| <= 1e-4."""
    policy = model if family == "qwen3" else _models()[family]
    async with EmbeddedEngine(policy, EngineConfig(num_slots=8, prefill_chunk=32), max_context=CONTEXT) as engine:
        episodes = await asyncio.gather(*(play(engine, seed, temperature=temperature) for seed in range(8)))
    batch = _pack([e.ids for e in episodes])
    with torch.no_grad():
        logits = packed_forward(policy, batch) @ head_weight(policy).T
    logprobs = torch.log_softmax(logits.float() / temperature, -1).gather(1, batch.labels[:, None])[:, 0]
    deltas = []
    for start, episode in zip(batch.cu_seqlens_host[:-1], episodes, strict=True):
        want = logprobs[[start + index - 1 for index in episode.sampled_at]]
        deltas.append((want - torch.tensor(episode.logprobs)).abs())
    assert float(torch.cat(deltas).mean()) <= 1e-5  # the promise is 1e-4; what is seen is 1e-6
    assert float(torch.cat(deltas).max()) <= 1e-4


def _pack(documents: list[list[int]]) -> PackedBatch:
    ids = torch.tensor([token for doc in documents for token in doc])
    lengths = torch.tensor([len(doc) for doc in documents])
    borders = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    none = torch.zeros(len(ids))
    return PackedBatch(
        input_ids=ids,
        labels=torch.roll(ids, -1),
        position_ids=torch.cat([torch.arange(len(doc)) for doc in documents]),
        cu_seqlens=borders.int(),
        cu_seqlens_host=tuple(borders.tolist()),
        kv_end=borders[1:].int().repeat_interleave(lengths),
        loss_mask=none.bool(),
        rollout_logprobs=none,
        old_logprobs=None,
        ref_logprobs=None,
        advantages=none,
        token_weights=none,
        temperature=None,
        policy_version=none.int(),
        trajectory_ids=("",) * len(documents),
    )
