"""The keys of the groups `engine` and `rollout`: how trajectories are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from swe_rl.config.bounds import Bounds
from swe_rl.errors import ConfigError


@dataclass(kw_only=True)
class EngineConfig:
    num_slots: int = 32  # episodes decoded together; the decode shape is fixed to it
    prefill_chunk: int = 64  # tokens per prefill call; fixed shape
    dtype: str = "float32"


@dataclass(kw_only=True)
class RolloutConfig:
    group_size: int = 8
    temperature: float = 1.0
    top_k: int = 0  # RL needs the full distribution: anything but 0, 1.0, 0.0 in these three is refused
    top_p: float = 1.0
    min_p: float = 0.0
    max_staleness: int = 0  # optimiser steps a rollout may lag behind; 0 is synchronous


ENGINE_BOUNDS = Bounds(choices={"dtype": ("float32", "bfloat16")}, positive=("num_slots", "prefill_chunk"))
ROLLOUT_BOUNDS = Bounds(positive=("group_size", "top_p"), not_negative=("temperature", "max_staleness"))
UNCUT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # the distribution that loss and evaluation assume


def validate_rollout(cfg: RolloutConfig) -> None:
    """The distribution that is sampled is the one that the loss assumes. ConfigError names the key and the cure."""
    for key, value in UNCUT.items():
        if getattr(cfg, key) != value:
            raise ConfigError(
                f"rollout.{key}={getattr(cfg, key)} cuts the distribution that the loss assumes: "
                f"set rollout.{key}={value}"
            )
