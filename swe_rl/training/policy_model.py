"""The trained module: transformer body, head and value head inside ONE forward.

FSDP2 gathers the parameters of the root module only while its forward runs. The head is therefore called in here and
never on its own: outside, `head.weight` would be this rank's shard. The value head is tiny and replicated.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swe_rl import ops
from swe_rl.config import AlgoConfig
from swe_rl.errors import ConfigError, InvariantError
from swe_rl.models.forward import head_weight, packed_forward
from swe_rl.ops.context_parallel import ContextGroup
from swe_rl.ops.token_loss import CORRECTIONS, DEFAULTS, LossRules, mismatch_weight
from swe_rl.types import PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OBJECTIVES = ("policy_gradient", "cross_entropy")
OWN_OLD = ("gspo", "on_policy")  # ratio rules whose ratio is not taken against old_logprobs


def loss_rules(algo: AlgoConfig, objective: str, *, has_old: bool) -> LossRules:
    """Keyword arguments of ops.linear_policy_loss that do not depend on the batch's values.

    cross_entropy is plain supervised learning: clip, correction, KL and entropy terms belong to policy gradients.
    Without old logprobs the batch is on-policy: one optimiser step per batch, the old policy is the current one.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective={objective!r} is unknown: use one of {', '.join(OBJECTIVES)}")
    if objective == "cross_entropy":
        return {"ratio_rule": "cross_entropy"}
    rule = {"ppo": "ppo", "gspo": "ppo", "cispo": "cispo", "on_policy": "on_policy"}[algo.ratio_rule]
    bounded = rule != "on_policy" and has_old
    inside = algo.correction in CORRECTIONS and not (has_old and algo.ratio_rule in OWN_OLD)
    return {
        "ratio_rule": rule if bounded or rule == "cispo" else "on_policy",
        "clip_low": algo.clip_low,
        "clip_high": algo.clip_high,
        "dual_clip": algo.dual_clip if bounded and rule == "ppo" else 0.0,
        "correction": algo.correction if inside else "none",
        "correction_low": algo.correction_low,
        "correction_cap": algo.correction_cap,
        "kl_coeff": algo.kl_coeff if algo.kl_in == "loss" else 0.0,
        "kl_estimator": algo.kl_estimator,
        "entropy_coeff": algo.entropy_coeff,
    }


def loss_columns(batch: PackedBatch, algo: AlgoConfig, objective: str) -> dict[str, Tensor | None]:
    """The [T] tensors of ops.linear_policy_loss that the rule reads."""
    if objective == "cross_entropy":
        return {"old_logprobs": None, "rollout_logprobs": batch.rollout_logprobs}
    old, coeff = batch.old_logprobs, batch.sequence_coeff
    if algo.ratio_rule in OWN_OLD and old is not None:
        if algo.correction in ("tis", "mask"):  # against the true old policy, which the head does not get to see
            rules: LossRules = {**DEFAULTS, "correction": algo.correction}
            rules["correction_low"], rules["correction_cap"] = algo.correction_low, algo.correction_cap
            coeff = mismatch_weight(old.double(), batch.rollout_logprobs.double(), rules)
        old = batch.ratio_old_logprobs
        if algo.ratio_rule == "gspo" and old is None:
            raise InvariantError("GSPO needs ratio_old_logprobs: call algorithms.sequences.gspo_old before the step")
    return {
        "old_logprobs": None if algo.ratio_rule == "on_policy" else old,
        "rollout_logprobs": batch.rollout_logprobs,
        "sequence_coeff": coeff,
        "ref_logprobs": batch.ref_logprobs,
    }


class PolicyModel(nn.Module):
    """A Hugging Face causal language model on packed rows, and a value head where the algorithm has one."""

    model: PreTrainedModel
    value_head: nn.Linear | None

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.value_head = None
        self.attention = "auto"  # of packed_forward

    def forward(
        self,
        batch: PackedBatch,
        rows: Tensor,
        *,
        algo: AlgoConfig | None = None,
        objective: str = "policy_gradient",
        head_impl: str = "auto",
        value_rows: Tensor | None = None,
        context: ContextGroup | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """With `algo`: (loss scalar, stats of ops.linear_policy_loss and sums of the value loss). Without: (logprobs
        [T] of `rows`, {}), or with `value_rows` the (values [T], {}) there; NaN elsewhere. Of trees [E] for [T].

        rows i64 are the indices of batch.loss_mask, value_rows those of finite batch.value_targets, found on the host
        so that a GPU is not waited for; head_impl is `impl` of the head's operations; context as in packed_forward.
        """
        hidden = target_hidden(packed_forward(self.model, batch, attention=self.attention, context=context), batch)
        weight = head_weight(self.model)
        if algo is None:
            if value_rows is not None:
                return _spread(self._values(hidden.index_select(0, value_rows)), value_rows, len(hidden)), {}
            return _score(hidden, weight, batch, rows, head_impl), {}
        loss, stats = ops.linear_policy_loss(
            hidden,
            weight,
            batch.labels,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            token_weights=batch.token_weights,
            temperature=1.0 if batch.temperature is None else batch.temperature,
            trained_rows=rows,
            impl=head_impl,
            **_terms(batch, algo, objective, trains=len(rows) > 0),
        )
        if value_rows is not None and objective == "policy_gradient":
            chosen = hidden.index_select(0, value_rows)
            value_loss, sums = self._value_loss(chosen if algo.value_trunk_grad else chosen.detach(), batch, value_rows)
            loss, stats = loss + algo.value_coeff * value_loss, {**stats, **sums}
        return loss, stats

    def _values(self, hidden: Tensor) -> Tensor:
        if self.value_head is None:
            raise InvariantError("there is no value head: the algorithm of this phase has none")
        return self.value_head(hidden.to(self.value_head.weight.dtype)).squeeze(-1)

    def _value_loss(self, hidden: Tensor, batch: PackedBatch, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(sum of value_weight (V - target)^2, unweighted sums for the statistics)."""
        assert batch.value_targets is not None
        assert batch.value_weight is not None  # packed together
        values = self._values(hidden)
        targets = batch.value_targets.index_select(0, rows).to(values.dtype)
        squared = (values - targets).square()
        weights = batch.value_weight.index_select(0, rows).to(values.dtype)
        sums = {
            "value_error": squared.detach().sum(),
            "value_target": targets.sum(),
            "value_target_squared": targets.square().sum(),
            "num_values": values.new_tensor(float(len(rows))),
        }
        return (squared * weights).sum(), sums


def target_hidden(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """The hidden state before each target: hidden [T, H] itself, or [E, H] in trees, where a row may have several.

    By indexing, whose gradient sums rows in a fixed order on a GPU too; index_select would add atomically.
    """
    return hidden if batch.target_rows is None else hidden[batch.target_rows]


def _terms(batch: PackedBatch, algo: AlgoConfig, objective: str, *, trains: bool) -> Any:
    """Columns and rules. A row that trains nothing (padding for ranks with fewer rows) carries no columns."""
    if not trains:
        return {"ratio_rule": "on_policy"}
    columns = loss_columns(batch, algo, objective)
    has_old = batch.old_logprobs is not None
    return {**columns, **loss_rules(algo, objective, has_old=has_old)}


def _score(hidden: Tensor, weight: Tensor, batch: PackedBatch, rows: Tensor, head_impl: str) -> Tensor:
    logprobs, _ = ops.linear_logprob(
        hidden.index_select(0, rows),
        weight,
        batch.labels.index_select(0, rows),
        temperature=1.0 if batch.temperature is None else batch.temperature.index_select(0, rows),
        impl=head_impl,
    )
    return _spread(logprobs, rows, len(hidden))


def _spread(values: Tensor, rows: Tensor, length: int) -> Tensor:
    """[rows] -> [length], NaN elsewhere."""
    whole = torch.full((length,), math.nan, dtype=values.dtype, device=values.device)
    return whole.index_copy(0, rows, values)
