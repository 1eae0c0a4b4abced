"""YaRN (arXiv:2309.00071) on a loaded model: the same rotary tables for trainer and engine.

transformers computes them: theta_d' = (1 - ramp) theta_d + ramp theta_d / s, the ramp linear in the dimension index d,
cos and sin multiplied by 0.1 ln s + 1. The original context is written out, because the fall-back to
max_position_embeddings shifts the ramp (Qwen3: 32,768 of 40,960).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swe_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swe_rl.config import ModelConfig

ORIGINAL = "rope_it_came_with"  # attribute of a model whose rotary embedding was changed


def set_rope(model: PreTrainedModel, cfg: ModelConfig) -> None:
    """Gives `model` the rotary embedding of `cfg`: YaRN, or with yarn_factor 1 the one that it came with. Idempotent.

    Changes model.config as well, so that exported weights say what they were trained with. Raises ConfigError for a
    model without one rotary embedding for all layers, or one that came with another scaling.
    """
    body: Any = model.base_model
    present: Any = getattr(model.config, "rope_parameters", None)
    wanted = cfg.yarn_factor > 1
    plain = hasattr(body, "rotary_emb") and isinstance(present, dict) and "rope_theta" in present
    if not plain:
        if wanted:
            raise ConfigError(f"model.yarn_factor={cfg.yarn_factor}: {cfg.name} has no rotary embedding to stretch")
        return
    came_with = getattr(model, ORIGINAL, None) or dict(present)
    after = came_with
    if wanted:
        after = {
            "rope_type": "yarn",
            "rope_theta": came_with["rope_theta"],
            "factor": cfg.yarn_factor,
            "original_max_position_embeddings": cfg.yarn_original_context,
        }
        if came_with.get("rope_type", "default") != "default" and not after.items() <= came_with.items():
            raise ConfigError(
                f"model.yarn_factor={cfg.yarn_factor}: {cfg.name} came with rope_type={came_with['rope_type']}"
            )
    if after != present:
        setattr(model, ORIGINAL, came_with)
        model.config.rope_parameters = dict(after)
        body.rotary_emb = type(body.rotary_emb)(config=model.config).to(body.rotary_emb.inv_freq.device)
