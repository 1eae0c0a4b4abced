"""The keys of the group `model`."""

from __future__ import annotations

from dataclasses import dataclass

from swe_rl.config.bounds import Bounds


@dataclass(kw_only=True)
class ModelConfig:
    name: str = "nano"  # "nano", a local Hugging Face directory, "smollm2-135m", or a hub name
    dtype: str = "float32"  # of the forward pass: float32 | bfloat16; master weights are always fp32
    # Only for name=nano (Qwen3 architecture, built deterministically from `init_seed`):
    hidden_size: int = 192
    num_layers: int = 3
    num_heads: int = 8
    num_kv_heads: int = 4
    intermediate_size: int = 512
    vocab_size: int = 1024
    init_seed: int = 0


BOUNDS = Bounds(
    choices={"dtype": ("float32", "bfloat16")},
    positive=("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size"),
)
