"""Small models and scripted multi-turn episodes for the engine tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from swe_rl.config import ModelConfig
from swe_rl.inference import EmbeddedEngine
from swe_rl.models.nano import build_model
from swe_rl.protocols import SamplingParams

VOCAB = 211


@dataclass
class Episode:
    """Ids of the whole context, and per sampled token its index in it and its logprob."""

    ids: list[int] = field(default_factory=list)
    sampled_at: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def sampled(self) -> list[int]:
        return [self.ids[i] for i in self.sampled_at]


async def turns_of(
    engine: EmbeddedEngine, seed: int, episode: Episode, *, turns: int, temperature: float
) -> AsyncIterator[None]:
    """A made-up environment whose observations depend on the seed only; yields after each turn."""
    script = random.Random(seed)
    episode.ids = [script.randrange(VOCAB) for _ in range(script.randrange(3, 40))]
    for turn in range(turns):
        params = SamplingParams(
            temperature=temperature, max_new_tokens=script.randrange(2, 12), stop_ids=(7,), seed=1000 * seed + turn
        )
        completion = await engine.generate(episode.ids, params, session=f"s{seed}")
        for token, logprob in zip(completion.token_ids, completion.rollout_logprobs, strict=True):
            episode.sampled_at.append(len(episode.ids))
            episode.ids.append(token)
            episode.logprobs.append(logprob)
        yield
        if turn + 1 < turns:
            episode.ids += [script.randrange(VOCAB) for _ in range(script.randrange(1, 25))]
    await engine.release(f"s{seed}")


async def run_episode(
    engine: EmbeddedEngine, seed: int, *, turns: int = 4, temperature: float = 1.0, pause_s: float = 0.0
) -> Episode:
    """One whole episode; `pause_s` lets others overtake."""
    episode = Episode()
    pauses = random.Random(-seed)
    async for _ in turns_of(engine, seed, episode, turns=turns, temperature=temperature):
        await asyncio.sleep(pause_s * pauses.random())
    return episode


async def run_round_robin(engine: EmbeddedEngine, seeds: Iterable[int], *, turns: int = 4) -> list[Episode]:
    """One turn of each episode after the other: all are alive at once, one runs at a time."""
    played = [(Episode(), seed) for seed in seeds]
    streams = [turns_of(engine, seed, episode, turns=turns, temperature=1.0) for episode, seed in played]
    for _ in range(turns + 1):
        for stream in streams:
            await anext(stream, None)
    return [episode for episode, _ in played]


@pytest.fixture
def model() -> Any:
    """Random weights with spread, so that logits are far from uniform and errors show."""
    model = build_model(
        ModelConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=96, vocab_size=VOCAB)
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return model


@pytest.fixture
def play() -> Callable[..., Any]:
    return run_episode


@pytest.fixture
def play_round_robin() -> Callable[..., Any]:
    return run_round_robin
