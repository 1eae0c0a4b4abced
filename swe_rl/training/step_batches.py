"""From the samples of one iteration to packed rows, per optimiser step, that carry all that the loss needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from swe_rl.algorithms.aggregation import count_rows, count_tokens, token_weights
from swe_rl.algorithms.sequences import gspo_old, with_sequence_coeff, without_rejected
from swe_rl.batching.minibatches import minibatch_of
from swe_rl.config import AlgoConfig, PhaseConfig, TrainConfig
from swe_rl.config.algo import REJECTING, SEQUENCE_CORRECTIONS, bypasses
from swe_rl.training import mesh
from swe_rl.training.rank_rows import balanced, laid_out, ranks_per_row
from swe_rl.types import PackedBatch, TrainSample

Score = Callable[[Sequence[PackedBatch]], list[Tensor]]


class Scorer(Protocol):
    """The part of TorchBackend that scores."""

    pair_cost: float  # see models.costs

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]: ...
    def ref_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The optimiser steps of one iteration: the same number on every rank."""

    parts: list[list[TrainSample]]  # this rank's samples of each, with the old policy they need
    rejected: int = 0  # trajectories of this rank that a correction rejected


def optimizer_steps(
    samples: Sequence[TrainSample], phase: PhaseConfig, cfg: TrainConfig, *, step: int, backend: Scorer
) -> Steps:
    """This rank's samples of each optimiser step of iteration `step`, scored by the present weights where the loss
    compares with them. Call before the first of these steps. Collective."""
    parts = _parts(samples, phase, cfg, step=step)
    if phase.data != "rollouts":
        return Steps(parts=parts)
    algo = cfg.algo
    kept = list(samples)
    if bypasses(algo, cfg.rollout):
        kept = [replace(sample, old_logprobs=sample.rollout_logprobs) for sample in kept]
    elif algo.correction in SEQUENCE_CORRECTIONS:  # may reject any rollout, also one without a gradient
        kept = scored(kept, "old_logprobs", backend.logprobs, cfg, backend=backend)
    elif len(parts) > 1:
        kept = _scored_where_moving(kept, cfg, backend=backend)
    if algo.kl_coeff and algo.kl_in == "loss":
        kept = scored(kept, "ref_logprobs", backend.ref_logprobs, cfg, backend=backend)
    rejected = 0
    if algo.correction in SEQUENCE_CORRECTIONS:
        kept, rejected = with_sequence_coeff(kept, algo.correction, low=algo.correction_low, cap=algo.correction_cap)
        if algo.correction in REJECTING and not algo.count_rejected:
            kept = without_rejected(kept)
    return Steps(parts=_parts(kept, phase, cfg, step=step, like=samples), rejected=rejected)


def packed_step(
    samples: Sequence[TrainSample], phase: PhaseConfig, cfg: TrainConfig, *, backend: Scorer
) -> list[PackedBatch]:
    """This rank's packed rows of one optimiser step, weighed; some come from ranks with more to do. Rollouts without a
    gradient are left out. GSPO compares with the weights at hand, so call it right before the step; its sequences stay
    on their rank. Collective."""
    weighed = weigh(samples, cfg)
    moving = with_gradient(weighed, cfg.algo) if phase.data == "rollouts" else weighed
    batches = laid_out(moving, cfg, backend=backend).batches
    if phase.data != "rollouts" or cfg.algo.ratio_rule != "gspo":
        return balanced(batches, backend=backend, group_size=ranks_per_row(cfg))
    (compared,) = mesh.all_reduce_max([float(any(batch.old_logprobs is not None for batch in batches))])
    return gspo_old(batches, backend.logprobs(batches)) if compared else batches


def with_gradient(samples: Sequence[TrainSample], algo: AlgoConfig) -> list[TrainSample]:
    """The samples that can move a weight: advantages of 0 (a group that all solved or all failed, negative_scale=0)
    multiply the only term of the loss there is, unless it has an entropy bonus, a KL penalty or a value. A rollout
    with several samples keeps all of them where GSPO takes the mean over its tokens. Weigh before: all count in the
    denominators.

    A rank may be left with none. Where all ranks are, one rollout that trains stands for all, the same on any number of
    ranks: the step remains a step, with its momentum and decay. Collective.
    """
    if algo.entropy_coeff or (algo.kl_coeff and algo.kl_in == "loss"):
        return list(samples)
    moving = [s for s in samples if any(s.advantages) or any(target == target for target in s.value_targets)]
    (anywhere,) = mesh.all_reduce_max([float(bool(moving))])
    if not anywhere:
        names = mesh.gather_objects(sorted(s.trajectory_id for s in samples if any(s.loss_mask))[:1])
        return [s for s in samples if names and s.trajectory_id == min(names)]
    if algo.ratio_rule != "gspo":
        return moving
    rollouts = {s.trajectory_id for s in moving}
    return [s for s in samples if s.trajectory_id in rollouts]


def scored(
    samples: Sequence[TrainSample], field: str, score: Score, cfg: TrainConfig, *, backend: Scorer
) -> list[TrainSample]:
    """The samples with `field` filled from `score` of their packed rows; 0.0 where nothing trains. Collective."""
    layout = laid_out(samples, cfg, backend=backend)
    lists = layout.unpack(score(layout.batches), fill=0.0)
    filled: list[dict[str, Any]] = [
        {field: [v if m else 0.0 for v, m in zip(found, sample.loss_mask, strict=True)]}
        for sample, found in zip(samples, lists, strict=True)
    ]
    return [replace(sample, **columns) for sample, columns in zip(samples, filled, strict=True)]


def _scored_where_moving(samples: Sequence[TrainSample], cfg: TrainConfig, *, backend: Scorer) -> list[TrainSample]:
    """The samples with old_logprobs: scored where `with_gradient` keeps them, else those of the rollout, for the case
    that one of them stands for all in some step. Collective."""
    moving = {id(sample) for sample in with_gradient(samples, cfg.algo)}
    some = [sample for sample in samples if id(sample) in moving]
    found = iter(scored(some, "old_logprobs", backend.logprobs, cfg, backend=backend))
    return [next(found) if id(s) in moving else replace(s, old_logprobs=s.rollout_logprobs) for s in samples]


def weigh(samples: Sequence[TrainSample], cfg: TrainConfig) -> list[TrainSample]:
    """Fills token and value weights with denominators that are global over ranks and micro-batches. Collective."""
    mode = cfg.algo.aggregation
    values = sum(target == target for sample in samples for target in sample.value_targets)  # NaN: no target
    counts = mesh.all_reduce_sum([count_rows(samples, mode), count_tokens(samples), values])
    weighed = token_weights(
        samples,
        mode,
        max_tokens=cfg.algo.normalizer_tokens or cfg.agent.max_context_tokens,
        num_rows_global=int(counts[0]),
        num_tokens_global=int(counts[1]),
    )
    return [replace(s, value_weight=1.0 / max(1.0, counts[2])) if s.value_targets else s for s in weighed]


def _parts(
    samples: Sequence[TrainSample],
    phase: PhaseConfig,
    cfg: TrainConfig,
    *,
    step: int,
    like: Sequence[TrainSample] | None = None,
) -> list[list[TrainSample]]:
    """algo.epochs passes over the samples, each cut into mini-batches of about phase.minibatch_size trajectories over
    all ranks; the parts are those of `like` (samples before some were rejected). Collective."""
    if phase.data != "rollouts":
        return [list(samples)]
    names = mesh.gather_objects(sorted({sample.trajectory_id for sample in (like or samples)}))
    parts: list[list[TrainSample]] = []
    for epoch in range(cfg.algo.epochs):
        seed = f"minibatches/{cfg.seed}/{phase.name}/{step}/{epoch}"
        count, place = minibatch_of(names, size=phase.minibatch_size, seed=seed)
        cut: list[list[TrainSample]] = [[] for _ in range(count)]
        for sample in samples:
            cut[place[sample.trajectory_id]].append(sample)
        parts += cut
    return parts
