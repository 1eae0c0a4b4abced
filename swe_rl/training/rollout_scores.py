"""What the trainer says about rollouts before they get credit: values of states, and the KL to the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from swe_rl.algorithms.credit import Scores
from swe_rl.batching.samples import to_samples
from swe_rl.config import TrainConfig
from swe_rl.ops.token_loss import kl_estimate
from swe_rl.training.rank_rows import laid_out
from swe_rl.types import PackedBatch, TrainSample, Trajectory


class RolloutScorer(Protocol):
    """The part of TorchBackend that scores."""

    pair_cost: float  # see models.costs

    def values(self, batches: Sequence[PackedBatch]) -> list[Tensor]: ...
    def ref_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]: ...


def needs_scores(cfg: TrainConfig) -> bool:
    """Whether credit needs the trainer."""
    return cfg.algo.advantage == "gae" or bool(cfg.algo.kl_coeff and cfg.algo.kl_in == "reward")


def rollout_scores(
    trajectories: Sequence[Trajectory], cfg: TrainConfig, *, backend: RolloutScorer
) -> dict[str, Scores]:
    """Scores by trajectory id, of this rank's rollouts. Collective: every rank calls, also without a rollout."""
    algo = cfg.algo
    samples = [s for t in trajectories for s in to_samples(t, 0.0, value_targets=[0.0] * len(t.turns))]
    layout = laid_out(samples, cfg, backend=backend)
    found = {t.trajectory_id: Scores(values=[0.0] * len(t.turns)) for t in trajectories}
    if algo.advantage == "gae":
        for sample, values in zip(samples, layout.unpack(backend.values(layout.batches), fill=math.nan), strict=True):
            turn_values = found[sample.trajectory_id].values
            for turn, value in _first_of_turns(sample, values):
                turn_values[turn] = value
    if algo.kl_coeff and algo.kl_in == "reward":
        sums = dict.fromkeys(found, 0.0)
        scored = layout.unpack(backend.ref_logprobs(layout.batches), fill=0.0)
        for sample, ref in zip(samples, scored, strict=True):
            sums[sample.trajectory_id] += _kl(sample, ref, algo.kl_estimator)
        found = {name: Scores(values=score.values, kl=sums[name]) for name, score in found.items()}
    return found


def _first_of_turns(sample: TrainSample, values: Sequence[float]) -> list[tuple[int, float]]:
    """(turn, value of the state before it) of the turns that begin in this sample."""
    return [
        (sample.turn_ids[place], values[place])
        for place, target in enumerate(sample.value_targets)
        if not math.isnan(target)
    ]


def _kl(sample: TrainSample, ref: Sequence[float], estimator: str) -> float:
    """Sum over the trained tokens, of the policy that sampled them: its logprobs are the engine's."""
    pairs = [(p, q) for p, q, m in zip(sample.rollout_logprobs, ref, sample.loss_mask, strict=True) if m]
    table = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
    return float(kl_estimate(table[:, 0], table[:, 1], estimator).sum())
