"""The one description of rotary embeddings, YaRN (arXiv:2309.00071) included, that feeds trainer and engine.

    theta_d = base^(-2d/D), theta_d' = (1 - ramp) theta_d + ramp theta_d / s, cos and sin times the attention factor

The ramp is linear in the dimension index d, from floor(d(beta_fast)) to ceil(d(beta_slow)) with
d(r) = D ln(L / (2 pi r)) / (2 ln base), as transformers, vLLM and Megatron have it (the paper's is linear in the number
of rotations). L, the context that the model was pretrained for, is always written out: the fall-back to
max_position_embeddings shifts the ramp (Qwen3: 32,768 of 40,960). YaRN is static: it changes short contexts too, so a
phase that switches it on or to another factor says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swe_rl.errors import ConfigError, InvariantError
from swe_rl.ops.rope_ops import MAX_ANGLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swe_rl.config import ModelConfig

ORIGINAL = "rope_it_came_with"  # attribute of a model whose rotary embedding was changed
# (model_type, max_position_embeddings as shipped) -> tokens of pretraining. The rest of the positions was left for
# answers, so the shipped number is no guide.
PRETRAINED = {("qwen3", 40960): 32768, ("qwen3_moe", 40960): 32768}
OPTIONS = {  # key of rope_parameters -> field; written out only where it is not the default
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding of `dim` dimensions of every head, in halves: dimension i turns with i + dim / 2."""

    theta: float  # base of the wavelengths
    dim: int  # rotated dimensions, even; the dimensions of a head behind them pass through
    factor: float = 1.0  # YaRN's s; 1: the plain embedding
    original_context: int = 0  # L, with a factor
    beta_fast: float = 32.0  # rotations over L above which a dimension keeps its frequency
    beta_slow: float = 1.0  # rotations below which it is divided by the factor
    truncate: bool = True  # the ends of the ramp are whole dimensions
    attention_factor: float = 0.0  # on cos and sin; 0: from mscale and mscale_all_dim, else 0.1 ln s + 1
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @property
    def scaling(self) -> float:
        """What cos and sin are multiplied by; attention logits get its square."""
        if self.attention_factor:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    @property
    def ramp(self) -> tuple[float, float]:
        """Dimensions between which frequencies go from unchanged to divided by the factor."""
        low, high = self._dimension(self.beta_fast), self._dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, self.dim - 1)

    def _dimension(self, rotations: float) -> float:
        return (self.dim * math.log(self.original_context / (rotations * 2 * math.pi))) / (2 * math.log(self.theta))

    def inv_freq(self) -> Tensor:
        """[dim / 2] fp32 radians per position, in the order of operations of transformers: equal to the last bit."""
        wavelengths = self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        plain = 1.0 / wavelengths
        if self.factor <= 1:
            return plain
        low, high = self.ramp
        if low == high:
            high += 0.001
        ramp = ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        keep = 1 - ramp
        return 1.0 / (self.factor * wavelengths) * (1 - keep) + plain * keep

    def tables(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, dim / 2] fp32 with the attention factor inside; angles are rounded to fp32, as the
        engines' are (see ops.rope for what that costs)."""
        angles = position_ids[:, None].float() * self.inv_freq().to(position_ids.device)
        return angles.cos() * self.scaling, angles.sin() * self.scaling

    def parameters(self) -> dict[str, Any]:
        """`rope_parameters` of a transformers config, which vLLM reads as well."""
        if self.factor <= 1:
            return {"rope_type": "default", "rope_theta": self.theta}
        written = {
            "rope_type": "yarn",
            "rope_theta": self.theta,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_context,
        }
        defaults = {item.name: item.default for item in fields(self)}
        for key, name in OPTIONS.items():
            if getattr(self, name) != defaults[name]:
                written[key] = getattr(self, name)
        return written

    def describe(self) -> str:
        """One line for a log."""
        if self.factor <= 1:
            return f"plain (base {self.theta:g})"
        low, high = self.ramp
        return (
            f"YaRN factor {self.factor:g} of {self.original_context} tokens (dimensions {low:g} to {high:g}, attention "
            f"factor {self.scaling:.6f})"
        )


def rope_from_config(config: Any) -> Rope:
    """The plain or YaRN embedding that a transformers config describes. ConfigError for another kind."""
    given = getattr(config, "rope_parameters", None)
    if not isinstance(given, dict) or "rope_theta" not in given:
        raise ConfigError(f"{config.model_type} has no rotary embedding that is the same for all layers")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    basis: dict[str, Any] = {
        "theta": given["rope_theta"],
        "dim": int(head_dim * (given.get("partial_rotary_factor") or 1.0)),
    }
    kind = given.get("rope_type", "default")
    if kind == "default":
        return Rope(**basis)
    if kind != "yarn":
        raise ConfigError(f"{config.model_type} came with rope_type={kind}: only default and yarn are supported")
    options = {name: given[key] for key, name in OPTIONS.items() if given.get(key) is not None}
    return Rope(**basis, factor=given["factor"], original_context=given["original_max_position_embeddings"], **options)


def wanted_rope(model: PreTrainedModel, cfg: ModelConfig) -> Rope | None:
    """What `cfg` asks of `model`: YaRN, or with yarn_factor 1 what the model came with; None for a model without a
    rotary embedding of one kind, or of a kind that is left alone.

    Raises ConfigError for what the model cannot have, and for a context of pretraining that is not the model's.
    """
    came_with = _came_with(model)
    plain = hasattr(model.base_model, "rotary_emb") and isinstance(came_with, dict) and "rope_theta" in came_with
    stretched = cfg.yarn_factor > 1
    if not plain:
        if stretched:
            raise ConfigError(f"model.yarn_factor={cfg.yarn_factor}: {cfg.name} has no rotary embedding to stretch")
        return None
    kind = came_with.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        if stretched:
            raise ConfigError(f"model.yarn_factor={cfg.yarn_factor}: {cfg.name} came with rope_type={kind}")
        return None
    base = rope_from_config(_Described(model.config, came_with))
    if not stretched:
        _check_original(model, base, f"{cfg.name} (rope_parameters in its config.json)")
        return base
    rope = Rope(
        theta=base.theta,
        dim=base.dim,
        factor=cfg.yarn_factor,
        original_context=cfg.yarn_original_context,
        beta_fast=cfg.yarn_beta_fast,
        beta_slow=cfg.yarn_beta_slow,
        truncate=cfg.yarn_truncate,
        attention_factor=cfg.yarn_attention_factor,
        mscale=cfg.yarn_mscale,
        mscale_all_dim=cfg.yarn_mscale_all_dim,
    )
    if kind == "yarn" and rope != base:
        raise ConfigError(
            f"model.yarn_factor={cfg.yarn_factor}: {cfg.name} came with rope_type=yarn, {base.describe()}: ask for the "
            "same, or leave model.yarn_factor out"
        )
    _check_original(model, rope, f"model.yarn_original_context={rope.original_context}")
    return rope


def set_rope(model: PreTrainedModel, cfg: ModelConfig) -> str:
    """Gives `model` the rotary embedding of `cfg`: YaRN, or with yarn_factor 1 the one that it came with. Idempotent.

    Changes model.config as well, so that exported weights say what they were trained with. Returns what changed, for
    the log; empty if nothing did. Raises ConfigError as `wanted_rope`, InvariantError where the model's own tables are
    not those of the description.
    """
    rope = wanted_rope(model, cfg)
    if rope is None:
        return ""
    came_with, present = _came_with(model), dict(model.config.rope_parameters)
    after = {**came_with, **rope.parameters()} if rope.factor > 1 else came_with
    if after == present:
        return ""
    before = rope_from_config(model.config)
    setattr(model, ORIGINAL, came_with)
    model.config.rope_parameters = dict(after)
    body: Any = model.base_model
    body.rotary_emb = type(body.rotary_emb)(config=model.config).to(body.rotary_emb.inv_freq.device)
    _check_tables(body.rotary_emb, rope)
    return f"rotary embedding from {before.describe()} to {rope.describe()}"


class _Described:
    """A config with other rope_parameters."""

    def __init__(self, config: Any, rope_parameters: dict[str, Any]) -> None:
        self._config, self.rope_parameters = config, rope_parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _came_with(model: PreTrainedModel) -> Any:
    return getattr(model, ORIGINAL, None) or getattr(model.config, "rope_parameters", None)


def _check_original(model: PreTrainedModel, rope: Rope, where: str) -> None:
    """ConfigError when the ramp would be computed for a context that the model was not pretrained for."""
    if rope.factor <= 1:
        return
    if rope.factor * rope.original_context > MAX_ANGLE:
        raise ConfigError(
            f"{where} and factor {rope.factor:g} make a context of more than 2^20 tokens, where fp32 angles are off by "
            "up to 0.25: use a smaller factor"
        )
    config: Any = model.config
    shipped = getattr(config, "max_position_embeddings", None)
    known = PRETRAINED.get((config.model_type, shipped or 0))
    if known is not None and rope.original_context != known:
        raise ConfigError(
            f"{where}: a {config.model_type} of {shipped} positions was pretrained for {known} tokens, "
            f"{rope.original_context} would shift YaRN's ramp: set it to {known}"
        )
    if shipped and rope.original_context > shipped:
        raise ConfigError(
            f"{where}: the model was pretrained for at most {shipped} tokens (max_position_embeddings): set it to the "
            "context of its pretraining"
        )


def _check_tables(rotary: Any, rope: Rope) -> None:
    """InvariantError unless transformers computed what `rope` describes: the engine is told the description."""
    own = rope.inv_freq()
    difference = (
        float((rotary.inv_freq.cpu() / own - 1).abs().max()) if rotary.inv_freq.shape == own.shape else math.inf
    )
    if not difference <= 1e-6 or not math.isclose(rotary.attention_scaling, rope.scaling, rel_tol=1e-6):
        raise InvariantError(
            f"transformers computes another rotary embedding than {rope.describe()}: inverse frequencies differ by "
            f"{difference:.1e}, its attention factor is {rotary.attention_scaling}"
        )
