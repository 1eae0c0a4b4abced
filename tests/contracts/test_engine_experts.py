"""Real vLLM with a mixture of experts: weights that were updated in place are those that sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import STOP, VOCAB
from test_engine_layouts import opened

from swe_rl.config import AlgoConfig, TrainerConfig
from swe_rl.models.attention import PACKED, register
from swe_rl.training.parity import compare, sample_probe
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.training.weight_sync import publish

# Sizes of an expert that the CPU kernel takes as they are, and one that it pads.
INTERMEDIATE = (32, 40)


def make_mixture(intermediate: int) -> TorchBackend:
    """Random weights with spread, heads of 32 dimensions: the smallest that vLLM has CPU attention for."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    register()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=intermediate,
        norm_topk_prob=True,
        max_position_embeddings=512,
        eos_token_id=STOP[0],
        attn_implementation=PACKED,
    )
    model: Any = Qwen3MoeForCausalLM(config)
    spread(model, seed=3)
    return TorchBackend(model, TrainerConfig(), algo=AlgoConfig())


def spread(model: Any, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn(p.shape, generator=generator))


@pytest.mark.slow
@pytest.mark.parametrize("intermediate", INTERMEDIATE)
async def test_experts_updated_in_place_are_those_that_sample(intermediate: int) -> None:
    backend = make_mixture(intermediate)
    async with opened(backend) as pair:
        for version in range(3):
            await publish(backend, pair.engine, version=version)
            played = await sample_probe(pair.engine, pair.contract, nonce=version)
            report = compare(played, pair.contract, score=backend.logprobs)
            assert report.ok, report.describe()
            print(report.describe())
            spread(backend.model, seed=10 + version)
