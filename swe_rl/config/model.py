"""The keys of the group `model`."""

from __future__ import annotations

from dataclasses import dataclass

from swe_rl.config.bounds import Bounds
from swe_rl.errors import ConfigError


@dataclass(kw_only=True)
class ModelConfig:
    name: str = "nano"  # "nano", a local Hugging Face directory, "smollm2-135m", or a hub name
    dtype: str = "float32"  # of the forward pass: float32 | bfloat16; master weights are always fp32
    # YaRN (arXiv:2309.00071) stretches the context by this factor; 1: the rotary embedding that the model came with.
    yarn_factor: float = 1.0
    yarn_original_context: int = 0  # tokens that the model was pretrained for; needed with yarn_factor, never guessed
    yarn_attention_factor: float = 0.0  # on cos and sin; 0: 0.1 ln(factor) + 1, or from the two scales below
    yarn_mscale: float = 0.0  # with yarn_mscale_all_dim: (0.1 a ln s + 1) / (0.1 b ln s + 1) is the attention factor
    yarn_mscale_all_dim: float = 0.0
    yarn_beta_fast: float = 32.0  # rotations over the original context above which a dimension is not stretched
    yarn_beta_slow: float = 1.0  # rotations below which it is stretched wholly
    yarn_truncate: bool = True  # the two limits are rounded outwards to whole dimensions
    lora_rank: int = 0  # adapters on all linear layers are trained instead of the weights; 0: no adapters
    lora_alpha: float = 0.0  # an adapter's product is multiplied by lora_alpha / lora_rank
    # Only for name=nano (Qwen3 architecture, built deterministically from `init_seed`):
    hidden_size: int = 192
    num_layers: int = 3
    num_heads: int = 8
    num_kv_heads: int = 4
    intermediate_size: int = 512
    vocab_size: int = 1024
    init_seed: int = 0


YARN_OPTIONS = (
    *("yarn_attention_factor", "yarn_mscale", "yarn_mscale_all_dim"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_truncate"),
)
YARN_KEYS = ("yarn_factor", "yarn_original_context", *YARN_OPTIONS)
BOUNDS = Bounds(
    choices={"dtype": ("float32", "bfloat16")},
    not_negative=(
        *("yarn_original_context", "lora_rank", "lora_alpha"),
        *("yarn_attention_factor", "yarn_mscale", "yarn_mscale_all_dim"),
    ),
    positive=(
        *("yarn_factor", "yarn_beta_fast", "yarn_beta_slow"),
        *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size"),
    ),
)


def validate_model(cfg: ModelConfig, *, max_context_tokens: int) -> None:
    """Numbers that belong together, and a context that they allow. ConfigError names the key and the cure."""
    if bool(cfg.lora_rank) != bool(cfg.lora_alpha):
        raise ConfigError(
            f"model.lora_rank={cfg.lora_rank} and model.lora_alpha={cfg.lora_alpha:g}: set both, or none of them"
        )
    _validate_yarn(cfg, max_context_tokens=max_context_tokens)


def _validate_yarn(cfg: ModelConfig, *, max_context_tokens: int) -> None:
    if cfg.yarn_factor < 1:
        raise ConfigError(f"model.yarn_factor must be 1 or more, got {cfg.yarn_factor}")
    if (cfg.yarn_factor > 1) != bool(cfg.yarn_original_context):
        raise ConfigError(
            f"model.yarn_factor={cfg.yarn_factor} and model.yarn_original_context={cfg.yarn_original_context}: set "
            "both (Qwen3 and Qwen2.5: 32768), or none of them"
        )
    if cfg.yarn_factor > 1 and max_context_tokens > cfg.yarn_factor * cfg.yarn_original_context:
        raise ConfigError(
            f"agent.max_context_tokens={max_context_tokens} is more than model.yarn_factor * "
            f"model.yarn_original_context = {cfg.yarn_factor * cfg.yarn_original_context:g}: lower it or raise that"
        )
    for key in YARN_OPTIONS:
        if cfg.yarn_factor == 1 and getattr(cfg, key) != getattr(ModelConfig, key):
            raise ConfigError(f"model.{key} does nothing without model.yarn_factor: remove it, or set that")
    if bool(cfg.yarn_mscale) != bool(cfg.yarn_mscale_all_dim):
        raise ConfigError(
            f"model.yarn_mscale={cfg.yarn_mscale:g} and model.yarn_mscale_all_dim={cfg.yarn_mscale_all_dim:g}: one "
            "alone does nothing: set both, or none of them"
        )
    if cfg.yarn_attention_factor and cfg.yarn_mscale:
        raise ConfigError(
            f"model.yarn_attention_factor={cfg.yarn_attention_factor:g} and model.yarn_mscale={cfg.yarn_mscale:g} "
            "exclude one another: remove one of them"
        )
    if cfg.yarn_beta_fast <= cfg.yarn_beta_slow:
        raise ConfigError(
            f"model.yarn_beta_fast={cfg.yarn_beta_fast:g} must be more than model.yarn_beta_slow="
            f"{cfg.yarn_beta_slow:g}: fast dimensions turn more often"
        )
