"""Opens the trainer of a configuration."""

from __future__ import annotations

import os
from typing import Any

import torch

from swe_rl.config import TrainConfig
from swe_rl.models.loading import has_files
from swe_rl.training.torch_backend import TorchBackend


def reads_weights(cfg: TrainConfig) -> bool:
    """Whether the trainer reads weights from the files of model.name itself, so that no process holds all of them. An
    engine in this process and init_weights need the whole model."""
    whole = cfg.engine.backend == "embedded" or bool(cfg.init_weights) or not has_files(cfg.model.name)
    return cfg.trainer.backend == "megatron" and not whole


def set_environment(cfg: TrainConfig) -> None:
    """What CUDA reads from the environment when a process first uses it; call before that. What is set there stays."""
    if cfg.trainer.backend == "megatron":  # keeps sends of tensor parallelism before the products that overlap them
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def open_trainer(cfg: TrainConfig, model: Any, *, device: torch.device) -> Any:
    """TorchBackend or MegatronBackend of `model`, in model.dtype. Collective. Raises ConfigError for what cannot be.

    MegatronBackend takes the weights out of `model`: an engine in this process has to have copied them before.
    """
    settings: dict[str, Any] = {"algo": cfg.algo, "device": device, "dtype": getattr(torch, cfg.model.dtype)}
    if cfg.trainer.backend == "megatron":
        from swe_rl.training.megatron.backend import MegatronBackend

        return MegatronBackend(model, cfg.trainer, **settings)
    return TorchBackend(model, cfg.trainer, **settings)
