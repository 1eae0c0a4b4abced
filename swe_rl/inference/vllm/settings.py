"""From the contract to vLLM's arguments: everything that decides a logprob is written out here, in one place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swe_rl.config import EngineConfig
from swe_rl.errors import ConfigError
from swe_rl.inference.vllm.cpu_experts import EXPERTS_SCHEDULER, RETURN_EXPERTS
from swe_rl.models.contract import PolicyContract

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# engine.weight_transfer -> the backend that weight_transfer.py registers with vLLM.
WEIGHT_TRANSFERS = {"host": "swe_rl_shared", "nccl": "swe_rl_nccl", "ipc": "swe_rl_ipc"}
WORKER_EXTENSION = "swe_rl.inference.vllm.weight_transfer.WorkerExtension"
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # that vLLM 0.32 has CPU attention for
CPU_BLOCK = 32  # tokens per block of keys: the smallest of the CPU kernels, so that few of a prefix are computed again


def engine_args(cfg: EngineConfig, contract: PolicyContract, *, directory: Path) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs. The weights are published to it, so none are read (dummies)."""
    args: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": contract.engine_dtype,
        "hf_overrides": {"head_dtype": contract.head_dtype},
        "max_model_len": contract.max_context,
        "max_num_seqs": cfg.num_slots,
        "tensor_parallel_size": cfg.tensor_parallel,
        "gpu_memory_utilization": cfg.gpu_memory,
        "enable_prefix_caching": cfg.prefix_caching,
        "enforce_eager": not cfg.cuda_graphs,
        "generation_config": "vllm",  # never the model's own top_k, top_p or penalties
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the trainer computes them
        "max_logprobs": 1,
        "seed": 0,
        "disable_log_stats": True,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": WEIGHT_TRANSFERS[cfg.weight_transfer]},
        "enable_sleep_mode": cfg.layout == "colocated" and torch.cuda.is_available(),
    }
    if cfg.router_replay:
        args[RETURN_EXPERTS] = True
        args |= {} if torch.cuda.is_available() else EXPERTS_SCHEDULER
    if cfg.attention != "auto":
        args["attention_backend"] = cfg.attention
    if cfg.cache_gib:
        args["kv_cache_memory_bytes"] = int(cfg.cache_gib * 2**30)
    if not torch.cuda.is_available():
        args["block_size"] = CPU_BLOCK
    return args


def write_model_directory(directory: Path, config: PretrainedConfig, *, architecture: str) -> None:
    """config.json as vLLM reads it, with the rotary embedding that the trainer's model has now; no weights."""
    own: Any = copy.deepcopy(config)
    own.architectures = [architecture]
    own.save_pretrained(directory)


def check_model(config: PretrainedConfig, *, name: str) -> None:
    """Raises ConfigError for a model that vLLM's CPU attention has no kernel for."""
    if torch.cuda.is_available():
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim not in CPU_HEAD_DIMS:
        raise ConfigError(
            f"model.name={name} has heads of {head_dim} dimensions, for which vLLM has no CPU kernel (it has "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}): choose engine=embedded, or a model with one of those"
        )
