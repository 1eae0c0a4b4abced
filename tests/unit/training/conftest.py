"""A tiny model and batches for trainer tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from swe_rl.batching import pack
from swe_rl.config import AlgoConfig, ModelConfig, TrainerConfig
from swe_rl.models.nano import build_model
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import PackedBatch, TrainSample

VOCAB = 50


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_backend() -> Callable[..., TorchBackend]:
    def make(
        *, algo: AlgoConfig | None = None, dtype: torch.dtype | None = None, seed: int = 0, **cfg: Any
    ) -> TorchBackend:
        model = build_model(
            ModelConfig(
                hidden_size=16,
                num_layers=2,
                num_heads=2,
                num_kv_heads=1,
                intermediate_size=24,
                vocab_size=VOCAB,
                init_seed=seed,
            )
        )
        settings = TrainerConfig(**{"learning_rate": 1e-3, **cfg})
        return TorchBackend(model, settings, algo=algo or AlgoConfig(), dtype=dtype)

    return make


@pytest.fixture
def make_batches() -> Callable[..., list[PackedBatch]]:
    def make(*, seed: int = 0, count: int = 4, max_tokens: int = 24, scale: float = 1.0) -> list[PackedBatch]:
        rng = random.Random(seed)
        samples = []
        for index in range(count):
            size = rng.randrange(4, 14)
            mask = [False, *(rng.random() < 0.7 for _ in range(size - 2)), True]
            samples.append(
                TrainSample(
                    trajectory_id=f"t{index}",
                    input_ids=[rng.randrange(VOCAB) for _ in range(size)],
                    loss_mask=mask,
                    rollout_logprobs=[-4.0 if m else 0.0 for m in mask],
                    advantages=[rng.choice((-1.0, 1.0)) * scale if m else 0.0 for m in mask],
                    turn_ids=[0 if m else -1 for m in mask],
                    policy_version=0,
                    temperature=1.0,
                    token_weights=[1 / 40 if m else 0.0 for m in mask],
                )
            )
        return [replace(b) for b in pack(samples, max_tokens=max_tokens)]

    return make
