"""The faults that a parity probe has to tell apart, each injected into a pair of trainer and engine that agree."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch
from engines import MODEL, Pair
from torch import Tensor

from swe_rl.batching import to_samples
from swe_rl.batching.packing import pack_row
from swe_rl.config import ModelConfig
from swe_rl.models.forward import head_weight, packed_forward
from swe_rl.models.rope import set_rope
from swe_rl.protocols import Policy, SamplingParams
from swe_rl.training.parity import ParityReport, compare, rope_variants, sample_probe
from swe_rl.training.weight_sync import publish
from swe_rl.types import Completion, PackedBatch

Score = Callable[[Sequence[PackedBatch]], list[Tensor]]


class Wrapped:
    """A Policy whose parameters and completions are changed on the way."""

    def __init__(self, inner: Policy, *, before: Any = None, after: Any = None) -> None:
        self._inner, self._before, self._after = inner, before or (lambda p: p), after or (lambda c: c)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        found: Completion = self._after(await self._inner.generate(prompt_ids, self._before(params), session=session))
        return found

    async def release(self, session: str) -> None:
        await self._inner.release(session)


async def probe(pair: Pair, *, policy: Any = None, score: Score | None = None, nonce: int = 3) -> ParityReport:
    played = await sample_probe(policy or pair.engine, pair.contract, nonce=nonce)
    without = rope_variants(pair.backend.model, MODEL, pair.backend.logprobs)
    return compare(played, pair.contract, score=score or pair.backend.logprobs, without=without)


async def another_temperature(pair: Pair) -> ParityReport:
    return await probe(pair, policy=Wrapped(pair.engine, before=lambda p: replace(p, temperature=0.7)))


async def raw_logprobs(pair: Pair) -> ParityReport:
    """The engine samples at 0.6 and reports the logprobs of temperature 1."""
    contract = replace(pair.contract, temperature=0.6)
    played = await sample_probe(pair.engine, contract, nonce=4)
    raw = []
    for trajectory in played:
        (sample,) = to_samples(trajectory, 0.0)
        (scores,) = pair.backend.logprobs([pack_row([replace(sample, temperature=1.0)])])
        values = iter(float(scores[i - 1]) for i, trains in enumerate(sample.loss_mask) if trains)
        turns = [
            replace(
                t, completion=replace(t.completion, rollout_logprobs=[next(values) for _ in t.completion.token_ids])
            )
            for t in trajectory.turns
        ]
        raw.append(replace(trajectory, turns=turns))
    return compare(raw, contract, score=pair.backend.logprobs)


async def shifted_logprobs(pair: Pair) -> ParityReport:
    def shift(got: Completion) -> Completion:
        return replace(got, rollout_logprobs=[*got.rollout_logprobs[1:], got.rollout_logprobs[0]])

    return await probe(pair, policy=Wrapped(pair.engine, after=shift))


async def head_in_bf16(pair: Pair) -> ParityReport:
    model = pair.backend.model

    def score(batches: Sequence[PackedBatch]) -> list[Tensor]:
        found = []
        for batch in batches:
            with torch.no_grad():
                logits = packed_forward(model, batch).bfloat16() @ head_weight(model).bfloat16().T
            scale = torch.ones(len(batch.labels)) if batch.temperature is None else batch.temperature
            found.append((logits.float() / scale[:, None]).log_softmax(-1).gather(1, batch.labels[:, None])[:, 0])
        return found

    return await probe(pair, score=score)


async def swapped_shards(pair: Pair) -> ParityReport:
    """The two halves of two matrices, as two ranks of tensor parallelism would hold them, change places."""
    weights = dict(pair.backend.weights())
    for name in ("model.layers.0.mlp.gate_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        weights[name] = torch.roll(weights[name], weights[name].shape[0] // 2, dims=0)
    await pair.engine.update_weights(weights, version=pair.engine.policy_version)
    try:
        return await probe(pair)
    finally:
        await publish(pair.backend, pair.engine, version=pair.engine.policy_version)


async def top_k_left_on(pair: Pair) -> ParityReport:
    with changed_requests(pair, lambda r: replace(r, sampling={**r.sampling, "top_k": 20})):
        return await probe(pair)


async def stale_prefix_cache(pair: Pair) -> ParityReport:
    """Weights change, blocks of the old ones stay and answer: no salt, and a reset that only says that it was one."""
    llm = pair.engine.replicas[0]._llm
    real = llm.reset_prefix_cache

    async def no_reset(**_: Any) -> bool:
        return True

    with changed_requests(pair, lambda r: replace(r, cache_salt="always the same")):
        await probe(pair, nonce=90)
        generator = torch.Generator().manual_seed(17)
        with torch.no_grad():
            for tensor in pair.backend.masters.params.values():
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
        llm.reset_prefix_cache = no_reset
        try:
            await publish(pair.backend, pair.engine, version=pair.engine.policy_version + 1)
            return await probe(pair, nonce=91)
        finally:
            llm.reset_prefix_cache = real
            await publish(pair.backend, pair.engine, version=pair.engine.policy_version + 1)


async def dropped_yarn(pair: Pair) -> ParityReport:
    async with engine_rope(pair, yarn_factor=1.0, yarn_original_context=0):
        return await probe(pair)


async def dropped_attention_factor(pair: Pair) -> ParityReport:
    async with engine_rope(pair, yarn_attention_factor=1.0):
        return await probe(pair)


@asynccontextmanager
async def engine_rope(pair: Pair, **changes: Any) -> AsyncIterator[None]:
    """The engine gets another rotary embedding than the trainer, and the right one back if that is quickly done (vLLM
    has to be started again for it)."""
    await _set_engine_rope(pair, replace(MODEL, **changes))
    yield
    if not hasattr(pair.engine, "replicas"):
        await _set_engine_rope(pair, MODEL)


async def _set_engine_rope(pair: Pair, cfg: ModelConfig) -> None:
    """It reads the embedding of the model that both share, so that one is changed for as long as the engine looks."""
    set_rope(pair.backend.model, cfg)
    await pair.engine.set_rope(cfg)
    set_rope(pair.backend.model, MODEL)
    await publish(pair.backend, pair.engine, version=pair.engine.policy_version)


class changed_requests:
    """Requests to the only replica are changed on the way."""

    def __init__(self, pair: Pair, change: Any) -> None:
        self._replica, self._change = pair.engine.replicas[0], change

    def __enter__(self) -> None:
        real = type(self._replica).stream
        self._replica.stream = lambda request: real(self._replica, self._change(request))

    def __exit__(self, *exc: object) -> None:
        del self._replica.stream


# fault -> words of the cause that must come first
FAULTS: dict[str, tuple[Callable[[Pair], Any], str]] = {
    "temperature": (another_temperature, "temperature: the engine's numbers fit at about 0.7"),
    "raw": (raw_logprobs, "raw logprobs"),
    "shifted": (shifted_logprobs, "shifted by one token"),
    "bf16 head": (head_in_bf16, "precision"),
    "swapped shards": (swapped_shards, "weights"),
    "dropped YaRN": (dropped_yarn, "fit without YaRN,"),
}
ONLY_VLLM: dict[str, tuple[Callable[[Pair], Any], str]] = {
    "top_k": (top_k_left_on, "top_k"),
    "stale cache": (stale_prefix_cache, "stale prefix cache"),
}
ONLY_EMBEDDED: dict[str, tuple[Callable[[Pair], Any], str]] = {
    "dropped attention factor": (dropped_attention_factor, "fit without YaRN's attention factor,"),
}
