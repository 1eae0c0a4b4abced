"""`swe-rl doctor --parity`: builds trainer and engine of a configuration, and compares the logprobs they give."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swe_rl.cli.hydra_entry import compose_config
from swe_rl.config import TrainConfig, validate


def run(overrides: Sequence[str]) -> int:
    """Exit code 0 when they agree, else 1, with the likely causes in order. ConfigError as `swe-rl train`."""
    cfg = compose_config(TrainConfig, "train", overrides)
    validate(cfg)
    report = asyncio.run(_probe(cfg))
    print(report.describe())
    return 0 if report.ok else 1


async def _probe(cfg: TrainConfig):  # type: ignore[no-untyped-def]  # a ParityReport, which would import torch
    import torch

    from swe_rl.agents.rendering import make_renderer
    from swe_rl.cli.engines import contract_of, open_engine
    from swe_rl.training.parity import compare, rope_variants, sample_probe
    from swe_rl.training.torch_backend import TorchBackend
    from swe_rl.training.weight_sync import publish

    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = _loaded(cfg)
    model.to(device)
    stop_ids = make_renderer(tokenizer, thinking=cfg.agent.thinking, observations=cfg.agent.observations).stop_ids
    contract = contract_of(cfg, model, tokenizer=tokenizer, stop_ids=stop_ids)
    async with open_engine(cfg, model, contract) as engine:
        trainer = replace(cfg.trainer, fsdp=False, context_parallel=1)  # one process
        backend = TorchBackend(model, trainer, algo=cfg.algo, device=device, dtype=getattr(torch, cfg.model.dtype))
        await publish(backend, engine)
        played = await sample_probe(engine, contract, nonce=0)
        without = rope_variants(model, cfg.model, backend.logprobs)
        return compare(played, contract, score=backend.logprobs, without=without)


def _loaded(cfg: TrainConfig) -> tuple[Any, Any]:
    from swe_rl.cli.build import load_policy

    return load_policy(cfg)
