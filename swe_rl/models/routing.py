"""Router replay: a mixture-of-experts model computes with the experts that the engine chose.

Two sides that round differently choose other experts where two of them nearly tie, and then differ by much more than
rounding. The engine therefore says which experts each token went to, and the trainer takes the same ones; how much each
of them counts stays the router's own, with its gradient.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from swe_rl.errors import ConfigError, InvariantError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FREE = -1  # a place that nothing was recorded for: the router chooses
ENCODED = np.dtype("<i2")


def encode_routing(experts: Any, *, first: int) -> str:
    """Of the tokens at positions `first`, `first` + 1, ... of a context, integers [n, layers, experts per token]; text,
    so that it fits wherever a completion is kept."""
    rows = np.ascontiguousarray(experts, dtype=ENCODED)
    return f"{first}:{rows.shape[1]}:{rows.shape[2]}:{base64.b64encode(rows.tobytes()).decode()}"


def decode_routing(pieces: Sequence[str], *, num_tokens: int) -> Tensor | None:
    """[num_tokens, layers, experts per token] i16 from pieces in order, the later ones being right where they overlap;
    FREE where none says anything, None without pieces. Raises InvariantError for pieces of several models."""
    found: Tensor | None = None
    for piece in pieces:
        first, layers, per_token, data = piece.split(":")
        shape = (-1, int(layers), int(per_token))
        rows = torch.from_numpy(np.frombuffer(base64.b64decode(data), dtype=ENCODED).reshape(shape).astype(np.int16))
        if found is None:
            found = torch.full((num_tokens, *rows.shape[1:]), FREE, dtype=torch.int16)
        if rows.shape[1:] != found.shape[1:]:
            raise InvariantError(
                f"expert choices of {tuple(rows.shape[1:])} and {tuple(found.shape[1:])} in one sample"
            )
        start, end = int(first), min(int(first) + len(rows), num_tokens)
        if start < end:
            found[start:end] = rows[: end - start]
    return found


def first_routing(pieces: Sequence[str], *, num_tokens: int) -> list[str]:
    """Pieces that say the same of the first tokens, and nothing of those behind them."""
    found = decode_routing(pieces, num_tokens=num_tokens)
    return [] if found is None else [encode_routing(found.numpy(), first=0)]


def num_routed_layers(config: PretrainedConfig) -> int:
    """Layers with a router; 0 for a dense model."""
    if not getattr(config, "num_experts", 0):
        return 0
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    step: int = getattr(config, "decoder_sparse_step", 1)
    return sum(i not in dense and (i + 1) % step == 0 for i in range(config.num_hidden_layers))


def check_replay(config: PretrainedConfig, *, name: str) -> None:
    """Raises ConfigError for a model whose routers cannot be told their choice."""
    routed = num_routed_layers(config)
    if not routed or not hasattr(config, "norm_topk_prob"):
        raise ConfigError(
            f"engine.router_replay=true needs a mixture of experts as Qwen3-MoE is one, model.name={name} is none: "
            "leave it out"
        )
    if routed != config.num_hidden_layers:
        raise ConfigError(
            f"engine.router_replay=true: only {routed} of {config.num_hidden_layers} layers of model.name={name} have "
            "experts, which is not supported: leave it out"
        )


def replay_routing(model: nn.Module, experts: Tensor | None) -> None:
    """The next forward passes choose these experts, [T, layers, experts per token]; None: the routers' own choice.

    It holds until the next call, so that a layer that is computed again in the backward pass chooses alike. Raises
    InvariantError when the model has other routers than that.
    """
    if experts is None and not getattr(getattr(model, "config", None), "num_experts", 0):
        return
    routers = _routers(model)
    if experts is not None and (len(routers), routers[0].top_k if routers else 0) != tuple(experts.shape[1:]):
        raise InvariantError(
            f"expert choices of {tuple(experts.shape[1:])} (layers, experts per token) for a model of {len(routers)} "
            "routers"
        )
    for layer, router in enumerate(routers):
        if not hasattr(router, "replayed_experts"):
            if experts is None:
                continue
            router.register_forward_hook(_replayed)
        router.replayed_experts = None if experts is None else experts[:, layer].long()


def _routers(model: nn.Module) -> list[Any]:
    """In the order of the layers."""
    return [m for m in model.modules() if hasattr(m, "norm_topk_prob") and hasattr(m, "top_k") and hasattr(m, "weight")]


def _replayed(router: Any, _: Any, output: Any) -> Any:
    """(logits [T, E], scores [T, K], indices [T, K]) with other indices, and the scores that the router gives those."""
    wanted: Tensor | None = router.replayed_experts
    if wanted is None:
        return output
    logits, scores, indices = output
    wanted = wanted.to(indices.device)
    chosen = torch.where(wanted == FREE, indices, wanted)
    given = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, chosen)
    if router.norm_topk_prob:
        given = given / given.sum(dim=-1, keepdim=True)
    return logits, given.to(scores.dtype), chosen
