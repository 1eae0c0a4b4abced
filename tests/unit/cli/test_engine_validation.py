"""The keys of engine.backend=vllm: what would do nothing is refused, in one line that names the cure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from swe_rl.config import AgentConfig, BatchingConfig, EngineConfig, ModelConfig, RolloutConfig, TrainerConfig
from swe_rl.config.rollout import (
    ENGINE_BOUNDS,
    validate_adapters,
    validate_engine,
    validate_replay,
    validate_rollout,
    validate_stall,
)
from swe_rl.config.run import TrainConfig, validate_groups
from swe_rl.errors import ConfigError
from swe_rl.inference.vllm.opening import check_installed
from swe_rl.inference.vllm.settings import check_model, engine_args
from swe_rl.models.contract import PolicyContract


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"backend": "embedded", "layout": "servers"}, "engine.layout does nothing for engine.backend=embedded"),
        ({"backend": "embedded", "parity_every": 3}, "engine.parity_every does nothing"),
        ({"urls": ["http://a:1"]}, "engine.urls does nothing for engine.layout=processes"),
        (
            {"urls": ["http://a:1"], "layout": "servers", "replicas": 2},
            "engine.replicas=2 does nothing with engine.urls",
        ),
        *(
            ({"urls": ["http://a:1"], "layout": "servers", key: value}, f"engine.{key}={value} does nothing with")
            for key, value in {
                "num_slots": 7,
                "tensor_parallel": 2,
                "gpu_memory": 0.5,
                "prefix_caching": False,
                "cuda_graphs": False,
                "attention": "FLASHINFER",
                "cache_gib": 1.5,
            }.items()
        ),
        ({"layout": "colocated", "replicas": 2}, "engine.replicas=2 does nothing for engine.layout=colocated"),
        ({"max_skew": 3}, "engine.max_skew does nothing with one replica"),
        ({"backend": "embedded", "weight_transfer": "nccl"}, "engine.weight_transfer does nothing for"),
        (
            {"urls": ["http://a:1"], "layout": "servers", "weight_transfer": "nccl"},
            "engine.weight_transfer=nccl needs engines that are started for it",
        ),
        (
            {"weight_transfer": "nccl", "weight_sync": "delta", "dtype": "bfloat16"},
            "engine.weight_transfer=nccl sends whole weights, not engine.weight_sync=delta",
        ),
        (
            {"weight_transfer": "nccl", "layout": "colocated"},
            "engine.weight_transfer=nccl does not reach engines of engine.layout=colocated: set it to ipc or host",
        ),
        (
            {"weight_transfer": "ipc"},
            "engine.weight_transfer=ipc does not reach engines of engine.layout=processes: set it to nccl or host",
        ),
        ({"prefill_chunk": 3}, "engine.prefill_chunk does nothing for engine.backend=vllm"),
    ],
)
def test_a_key_without_effect_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        validate_engine(EngineConfig(**{"backend": "vllm", **keys}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"replicas": 2, "max_skew": 3},
        {"urls": ["http://a:1", "http://b:1"], "layout": "servers", "max_skew": 2},
        {"layout": "colocated"},
        {"weight_sync": "delta", "dtype": "bfloat16"},
        {"layout": "colocated", "weight_transfer": "ipc"},
        {"layout": "servers", "weight_transfer": "nccl", "replicas": 2},
        {"layout": "ray", "replicas": 4, "in_flight": "abort", "stall_s": 30.0, "parity_every": 10},
    ],
)
def test_what_takes_effect_is_allowed(keys: dict[str, Any]) -> None:
    validate_engine(EngineConfig(backend="vllm", **keys))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("replicas", 0), ("stall_s", 0.0), ("cache_gib", -1.0), ("in_flight", "wait"), ("layout", "here")),
        ("weight_transfer", "auto"),
    ],
)
def test_values_out_of_bounds_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"engine.{key}"):
        ENGINE_BOUNDS.check(EngineConfig(**{key: value}), "engine")


def test_a_cpu_needs_the_size_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"engine\.cache_gib=0 lets vLLM take most"):
        check_installed(EngineConfig(backend="vllm"))
    check_installed(EngineConfig(backend="vllm", cache_gib=1.0))
    with pytest.raises(ConfigError, match=r"engine\.weight_transfer=nccl goes .* and there is none: set it to host"):
        check_installed(EngineConfig(backend="vllm", cache_gib=1.0, weight_transfer="nccl"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs vLLM: pip install"):
        check_installed(EngineConfig(backend="vllm", cache_gib=1.0))


def test_a_model_without_a_cpu_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3Config

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="has heads of 24 dimensions"):
        check_model(Qwen3Config(head_dim=24), name="nano")
    check_model(Qwen3Config(head_dim=32), name="nano")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_model(Qwen3Config(head_dim=24), name="nano")


def test_the_engine_is_built_from_the_contract(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Everything that decides a logprob is written out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    contract = PolicyContract(
        vocab_size=50,
        stop_ids=(7,),
        temperature=0.8,
        max_context=320,
        trainer_dtype="float32",
        engine_dtype="bfloat16",
        rope={"rope_type": "default"},
    )
    args = engine_args(EngineConfig(backend="vllm", num_slots=9), contract, directory=tmp_path)
    wanted = {"generation_config": "vllm", "logprobs_mode": "processed_logprobs", "dtype": "bfloat16"}
    wanted |= {"max_model_len": 320, "max_num_seqs": 9, "hf_overrides": {"head_dtype": "float32"}}  # type: ignore[dict-item]
    assert wanted.items() <= args.items()
    ways = {"host": "swe_rl_shared", "nccl": "swe_rl_nccl", "ipc": "swe_rl_ipc"}
    for way, backend in ways.items():
        args = engine_args(EngineConfig(backend="vllm", weight_transfer=way), contract, directory=tmp_path)
        assert args["weight_transfer_config"] == {"backend": backend}
    assert EngineConfig().weight_transfer == "host"
    assert (contract.bound, contract.bias_bound) == (0.06, 0.02)  # contract.py says where they come from


def test_vllms_own_server_returns_no_experts_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = EngineConfig(backend="vllm", cache_gib=1.0, router_replay=True)
    check_installed(cfg)
    with pytest.raises(ConfigError, match=r"engine\.router_replay=true needs a GPU with engine\.layout=servers"):
        check_installed(replace(cfg, layout="servers"))


def test_the_experts_of_cached_tokens_are_known_with_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match=r"router_replay=true needs engine\.prefix_caching=True, it is False"):
        validate_replay(
            EngineConfig(backend="vllm", router_replay=True, prefix_caching=False), BatchingConfig(), TrainerConfig()
        )


def test_servers_that_are_there_need_nothing_on_this_machine() -> None:
    check_installed(EngineConfig(backend="vllm", layout="servers", urls=["http://a:1"]))


def test_the_address_of_a_cluster_needs_something_that_runs_there() -> None:
    rollout = RolloutConfig(ray_address="10.0.0.7:6379")
    validate_rollout(rollout, EngineConfig(backend="vllm", layout="ray"))
    validate_rollout(replace(rollout, backend="ray"), EngineConfig())
    with pytest.raises(ConfigError, match=r"rollout.ray_address=10.0.0.7:6379 does nothing .* engine.layout=ray"):
        validate_rollout(rollout, EngineConfig(backend="vllm"))


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [("batching", "layout", "tree"), ("trainer", "backend", "megatron"), ("trainer", "context_parallel", 2)],
)
def test_replayed_experts_need_rows_that_can_take_them(group: str, key: str, value: Any) -> None:
    groups = {"batching": BatchingConfig(), "trainer": TrainerConfig()}
    engine = EngineConfig(backend="vllm", router_replay=True)
    validate_replay(engine, **groups)  # type: ignore[arg-type]
    groups[group] = replace(groups[group], **{key: value})  # type: ignore[type-var]
    validate_replay(replace(engine, router_replay=False), **groups)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"engine.router_replay=true needs {group}.{key}=.*, it is {value}"):
        validate_replay(engine, **groups)  # type: ignore[arg-type]


def test_adapters_do_not_go_from_gpu_to_gpu() -> None:
    model = ModelConfig(lora_rank=8, lora_alpha=16.0)
    validate_adapters(EngineConfig(backend="vllm"), model)
    validate_adapters(EngineConfig(backend="vllm", weight_transfer="nccl"), ModelConfig())
    cfg = TrainConfig(engine=EngineConfig(backend="vllm", weight_transfer="nccl"), model=model)
    with pytest.raises(ConfigError, match=r"engine.weight_transfer=nccl sends whole weights, with model.lora_rank=8"):
        validate_groups(cfg)


def test_a_hang_is_found_before_the_episodes_run_out_of_time() -> None:
    validate_stall(EngineConfig(backend="vllm"), AgentConfig())
    validate_stall(EngineConfig(), AgentConfig(episode_s=1.0))  # embedded: in this process
    with pytest.raises(ConfigError, match=r"engine.stall_s=300 must be smaller than agent.episode_s=300,") as caught:
        validate_stall(EngineConfig(backend="vllm", stall_s=300.0), AgentConfig())
    assert "\n" not in str(caught.value)
    cfg = TrainConfig(engine=EngineConfig(backend="vllm"), agent=AgentConfig(episode_s=120.0))
    with pytest.raises(ConfigError, match=r"engine.stall_s=120 must be smaller than agent.episode_s=120,"):
        validate_groups(cfg)
