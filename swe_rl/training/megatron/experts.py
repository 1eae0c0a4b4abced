"""Mixtures of experts: the router of Qwen3-MoE in a layer spec of megatron-core.

The rest is megatron-core's: its experts one by one (SequentialMLP) and its dispatcher, which sends tokens to the ranks
that hold their experts, as many as there are for each ("alltoall", the only one for rows of any length). An expert is
cut over tensor parallel ranks, the router is whole on every rank: each sees the tokens of its own, so its gradient is
summed over all ranks that hold the layer, those of experts over the ranks that hold the same expert.

Its experts' parallel ranks are data and context parallel ones, so forward passes meet: all ranks of a stage compute
equally many rows (rows.replica_rows).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def expert_options(hf: Any, num_layers: int, dense_layers: tuple[int, ...]) -> dict[str, Any]:
    """Fields of TransformerConfig for a Qwen3-MoE config: no loss of its own, no limit on the tokens of an expert."""
    return {
        "num_moe_experts": hf.num_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_layer_freq": [int(layer not in dense_layers) for layer in range(num_layers)],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def use_router(spec: Any, *, normalize: bool) -> None:
    """Puts our router into the layer spec of a mixture of experts, in place."""
    spec.submodules.mlp.submodules.router = functools.partial(router_class(), normalize=normalize)


@functools.cache
def router_class() -> Any:
    """megatron-core's TopKRouter, choosing and weighing as transformers' Qwen3MoeTopKRouter does."""
    from megatron.core.transformer.moe.router import TopKRouter

    class SoftmaxRouter(TopKRouter):
        """Softmax over all experts in fp32 (fp64 for fp64), then the largest; `normalize` (norm_topk_prob) makes them
        sum to 1. Megatron's own rounds to the dtype of the logits before it chooses, and knows fp32 only."""

        def __init__(self, config: Any, pg_collection: Any = None, *, normalize: bool) -> None:
            super().__init__(config=config, pg_collection=pg_collection)
            self.normalize = normalize

        def gating(self, hidden: Tensor) -> Tensor:
            """Logits in the dtype of `hidden`. Megatron's own multiplication needs Transformer Engine in 0.16.1."""
            return F.linear(hidden, self.weight)

        def routing(self, logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            """logits [n, 1, E] -> (weights [n, E] in their dtype, 0 where not chosen; which are chosen [n, E])."""
            logits = logits.view(-1, self.config.num_moe_experts)
            probs = torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
            values, chosen = torch.topk(probs, self.topk, dim=-1)
            if self.normalize:
                values = values / values.sum(dim=-1, keepdim=True)
            weights = torch.zeros_like(logits).scatter(1, chosen, values.to(logits.dtype))
            return weights, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)

    return SoftmaxRouter
