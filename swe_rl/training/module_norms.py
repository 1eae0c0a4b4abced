"""The gradient norm by kind of module: which part of the model a step moves."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

MODULE_GROUPS = (  # (name of the group, parts of parameter names), first match counts
    ("norm", ("norm",)),
    ("embedding", ("embed", "wte")),
    ("head", ("lm_head",)),
    ("attention", ("attn", "attention")),
    ("mlp", ("mlp", "feed_forward")),
)


def module_group(name: str) -> str:
    """The group of modules that a parameter belongs to; "other" for what no pattern names."""
    return next((group for group, parts in MODULE_GROUPS if any(part in name for part in parts)), "other")


def module_norms(params: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """Norm of the gradient of each group of modules, before clipping. Collective when sharded."""
    parts: dict[str, list[Tensor]] = {}
    for name, param in params.items():
        if param.grad is not None:
            parts.setdefault(module_group(name), []).append(param.grad)
    norms: dict[str, float] = {}
    for group, grads in sorted(parts.items()):
        total = nn.utils.get_total_norm(grads)
        norms[group] = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
    return norms
