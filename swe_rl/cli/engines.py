"""Opens the engine of a configuration, and writes down what it and the trainer have to agree on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from swe_rl.config import TrainConfig
from swe_rl.inference import EmbeddedEngine
from swe_rl.inference.base import Engine
from swe_rl.models.contract import PolicyContract, policy_contract
from swe_rl.ray_connection import ray_connection


@asynccontextmanager
async def open_engine(cfg: TrainConfig, model: Any, contract: PolicyContract) -> AsyncIterator[Engine]:
    """Open it before the trainer is made: an engine in this process copies the model, which a sharded one does not
    allow. Raises ConfigError for what cannot run here."""
    if cfg.engine.backend == "embedded":
        async with EmbeddedEngine(model, cfg.engine, max_context=cfg.agent.max_context_tokens) as engine:
            yield engine
        return
    from swe_rl.inference.vllm import open_vllm

    async with AsyncExitStack() as stack:
        if cfg.engine.layout == "ray":
            await stack.enter_async_context(ray_connection(cfg.rollout.ray_address))
        yield await stack.enter_async_context(open_vllm(model, cfg.engine, contract=contract, name=cfg.model.name))


def contract_of(cfg: TrainConfig, model: Any, *, tokenizer: Any, stop_ids: tuple[int, ...]) -> PolicyContract:
    """The contract of a phase: `cfg` with its overrides, `model` with its rotary embedding."""
    return policy_contract(
        model.config,
        model=cfg.model,
        engine=cfg.engine,
        stop_ids=stop_ids,
        temperature=cfg.rollout.temperature,
        max_context=cfg.agent.max_context_tokens,
        tokenizer_size=len(tokenizer),
    )
