"""Real vLLM with a mixture of experts: weights updated in place are those that sample, and the trainer takes the
experts that the engine chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import STOP, VOCAB
from test_engine_layouts import opened

from swe_rl.batching import to_samples
from swe_rl.config import AlgoConfig, TrainerConfig
from swe_rl.models.attention import PACKED, register
from swe_rl.models.routing import FREE, decode_routing
from swe_rl.training.parity import compare, sample_probe
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.training.weight_sync import publish
from swe_rl.types import Trajectory

NEARLY = 3e-8  # between the routers' rows of two twins: rounding decides which of them is chosen


def make_mixture(*, per_token: int, intermediate: int) -> TorchBackend:
    """Heads of 32 dimensions: the smallest that vLLM has CPU attention for."""
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
        num_experts_per_tok=per_token,
        moe_intermediate_size=intermediate,
        norm_topk_prob=True,
        max_position_embeddings=512,
        eos_token_id=STOP[0],
        attn_implementation=PACKED,
    )
    model: Any = Qwen3MoeForCausalLM(config)
    return TorchBackend(model, TrainerConfig(), algo=AlgoConfig())


def spread(model: Any, *, seed: int, twins: bool = False) -> None:
    """Random weights, so that distributions are far from uniform and errors show. Twins: experts in pairs that their
    router cannot tell apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn(p.shape, generator=generator))
        for layer in model.model.layers if twins else ():
            first = layer.mlp.gate.weight[0::2]
            layer.mlp.gate.weight[1::2] = first + NEARLY * torch.randn(first.shape, generator=generator)


def first_turn(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, turns=trajectory.turns[:1])


def without_experts(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [
        replace(t, turns=[replace(turn, completion=replace(turn.completion, routing="")) for turn in t.turns])
        for t in trajectories
    ]


@pytest.mark.slow
async def test_where_two_experts_nearly_tie_the_trainer_takes_the_one_that_the_engine_took() -> None:
    backend = make_mixture(per_token=3, intermediate=40)  # vLLM's kernel pads experts of 40 to 64
    async with opened(backend, router_replay=True) as pair:
        for version in range(2):
            spread(backend.model, seed=3 + version, twins=True)
            await publish(backend, pair.engine, version=version)
            played = await sample_probe(pair.engine, pair.contract, nonce=version)
            report = compare([first_turn(each) for each in played], pair.contract, score=backend.logprobs)
            assert report.ok, report.describe()
            for sample in (sample for trajectory in played for sample in to_samples(trajectory, 0.0)):
                known = decode_routing(sample.routing, num_tokens=len(sample.input_ids) - 1)
                assert known is not None
                assert not bool(known.eq(FREE).any())
            blind = compare(without_experts(played), pair.contract, score=backend.logprobs)
            assert not blind.ok, blind.describe()
            # The last, partly filled block of a turn is computed again for the next one, maybe by other twins.
            whole = compare(played, pair.contract, score=backend.logprobs)
            assert max(whole.means.values()) < 0.2 * min(blind.means.values())
            print(f"first turns {dict(report.means)}, all {dict(whole.means)}, without experts {dict(blind.means)}")


@pytest.mark.nightly
@pytest.mark.parametrize("intermediate", [32, 40])  # as the kernel takes them, and padded
async def test_experts_updated_in_place_are_those_that_sample(intermediate: int) -> None:
    backend = make_mixture(per_token=2, intermediate=intermediate)
    async with opened(backend) as pair:
        for version in range(3):
            spread(backend.model, seed=3 + version)
            await publish(backend, pair.engine, version=version)
            played = await sample_probe(pair.engine, pair.contract, nonce=version)
            report = compare(played, pair.contract, score=backend.logprobs)
            assert report.ok, report.describe()
