"""The trained module: transformer body and head inside ONE forward.

FSDP2 gathers the parameters of the root module only while its forward runs. The head is therefore called in here and
never on its own: outside, `head.weight` would be this rank's shard.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from swe_rl import ops
from swe_rl.config import AlgoConfig
from swe_rl.errors import ConfigError
from swe_rl.models.forward import head_weight, packed_forward
from swe_rl.ops.token_loss import LossRules
from swe_rl.types import PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OBJECTIVES = ("policy_gradient", "cross_entropy")


def loss_rules(algo: AlgoConfig, objective: str, *, has_old: bool) -> LossRules:
    """Keyword arguments of ops.linear_policy_loss that do not depend on the batch's values.

    cross_entropy is plain supervised learning: clip, correction, KL and entropy terms belong to policy gradients.
    Without old logprobs the batch is on-policy: one optimiser step per batch, the old policy is the current one.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective={objective!r} is unknown: use one of {', '.join(OBJECTIVES)}")
    if objective == "cross_entropy":
        return {"ratio_rule": "cross_entropy"}
    return {
        "ratio_rule": "ppo" if has_old else "on_policy",
        "clip_low": algo.clip_low,
        "clip_high": algo.clip_high,
        "correction": algo.correction,
        "correction_cap": algo.correction_cap,
        "entropy_coeff": algo.entropy_coeff,
    }


class PolicyModel(nn.Module):
    """A Hugging Face causal language model on packed rows."""

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        batch: PackedBatch,
        trained_rows: Tensor,
        *,
        algo: AlgoConfig | None = None,
        objective: str = "policy_gradient",
        head_impl: str = "auto",
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """With `algo`: (loss scalar, stats of ops.linear_policy_loss). Without: (logprobs [T], {}), NaN if masked.

        trained_rows i64 are the indices of batch.loss_mask, found on the host so that a GPU is not waited for;
        head_impl is `impl` of the head's operations.
        """
        hidden = packed_forward(self.model, batch)
        weight = head_weight(self.model)
        if algo is None:
            return _score(hidden, weight, batch, trained_rows, head_impl), {}
        return ops.linear_policy_loss(
            hidden,
            weight,
            batch.labels,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            token_weights=batch.token_weights,
            old_logprobs=batch.old_logprobs if objective == "policy_gradient" else None,
            rollout_logprobs=batch.rollout_logprobs,
            ref_logprobs=batch.ref_logprobs,
            temperature=1.0 if batch.temperature is None else batch.temperature,
            trained_rows=trained_rows,
            impl=head_impl,
            **loss_rules(algo, objective, has_old=batch.old_logprobs is not None),
        )


def _score(hidden: Tensor, weight: Tensor, batch: PackedBatch, rows: Tensor, head_impl: str) -> Tensor:
    logprobs, _ = ops.linear_logprob(
        hidden.index_select(0, rows),
        weight,
        batch.labels.index_select(0, rows),
        temperature=1.0 if batch.temperature is None else batch.temperature.index_select(0, rows),
        impl=head_impl,
    )
    scored = torch.full((len(batch.loss_mask),), math.nan, dtype=logprobs.dtype, device=logprobs.device)
    return scored.index_copy(0, rows, logprobs)
