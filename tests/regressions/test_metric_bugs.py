"""Bugs of other systems in metrics of training, each with its formula beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from gradients_worker import make_samples, with_old
from immunity import immune
from torch import Tensor

from swe_rl.batching import pack
from swe_rl.metric_table import combine_steps
from swe_rl.rollout.statistics import rollout_metrics, total
from swe_rl.training.stats import StepTotals, step_metrics
from swe_rl.types import PackedBatch


def step_of(batches: Sequence[PackedBatch], current: float = -1.0) -> dict[str, float]:
    """The metrics of a step in which every trained token has logprob `current`."""
    totals = StepTotals()
    for batch in batches:
        count = int(batch.loss_mask.sum())
        stats = {
            "logprobs": torch.full((count,), current),
            "entropy": torch.full((count,), 0.5),
            "ratio": torch.ones(count),
            "clipped": torch.zeros(count, dtype=torch.bool),
        }
        totals.add(batch, torch.zeros(()), stats, on_policy_data=True)
    totals.reduce()
    found = totals.finish(step=1, policy_version=0, grad_norm=0.0, skipped=False, seconds=1.0, peak_memory=0)
    return step_metrics(found)


def batches(max_tokens: int = 40) -> list[PackedBatch]:
    return with_old(pack(make_samples(), max_tokens=max_tokens))


def test_mean_of_the_means_of_ranks() -> None:
    """TRL 6380: ranks with few rollouts weighed as much as ranks with many."""
    parts = [{"trajectories": 1.0, "turns": 9.0}, {"trajectories": 3.0, "turns": 3.0}]

    def of_means(ranks: Sequence[dict[str, float]]) -> float:
        return fmean(rank["turns"] / rank["trajectories"] for rank in ranks)

    def of_sums(ranks: Sequence[dict[str, float]]) -> float:
        return rollout_metrics(total(ranks))["rollout/num_turns_mean"]

    def check(mean: Callable[[Sequence[dict[str, float]]], float]) -> None:
        assert mean(parts) == 3.0

    immune(check, ours=of_sums, buggy=of_means)


def test_a_maximum_reduced_as_a_mean() -> None:
    """miles 1968: the largest difference of an iteration was the mean of the largest ones of its steps."""
    steps = [
        {"train/logprob_abs_diff_max": 0.1, "train/num_tokens": 10.0},
        {"train/logprob_abs_diff_max": 0.5, "train/num_tokens": 30.0},
    ]

    def means(values: Sequence[dict[str, float]]) -> dict[str, float]:
        return {name: fmean(step[name] for step in values) for name in values[0]}

    def check(combine: Callable[[Sequence[dict[str, float]]], dict[str, float]]) -> None:
        assert combine(steps) == {"train/logprob_abs_diff_max": 0.5, "train/num_tokens": 40.0}

    immune(check, ours=combine_steps, buggy=means)


def test_metrics_do_not_depend_on_the_split_into_micro_batches() -> None:
    """TRL 6380 again, one level down: a mean per micro-batch, averaged."""

    def averaged(parts: Sequence[PackedBatch]) -> dict[str, float]:
        each = [step_of([part]) for part in parts if bool(part.loss_mask.any())]
        return {name: fmean(step[name] for step in each) for name in each[0]}

    whole = step_of(batches(1000))

    def check(metrics: Callable[[Sequence[PackedBatch]], dict[str, float]]) -> None:
        found = metrics(batches(40))
        for name in ("train/kl_rollout", "train/mismatch_k3", "train/mismatch_ess", "train/advantage_std"):
            assert found[name] == pytest.approx(whole[name], rel=1e-9), name

    immune(check, ours=step_of, buggy=averaged)


def test_mismatch_measured_on_weights_that_the_correction_has_clamped() -> None:
    """AReaL 1408, verl 6806: a dead metric, computed on weights after the cap."""

    def raw(batch: PackedBatch) -> float:
        return step_of([batch])["train/mismatch_k3"]

    def after_cap(batch: PackedBatch) -> float:
        assert batch.old_logprobs is not None
        log_w = (batch.old_logprobs - batch.rollout_logprobs)[batch.loss_mask].double().clamp(max=math.log(1.2))
        return float((log_w.exp() - 1 - log_w).mean())

    def check(k3: Callable[[PackedBatch], float]) -> None:
        (batch,) = batches(1000)
        assert batch.old_logprobs is not None
        log_w = (batch.old_logprobs - batch.rollout_logprobs)[batch.loss_mask].double()
        assert k3(batch) == pytest.approx(fmean(math.exp(x) - 1 - x for x in log_w.tolist()))

    immune(check, ours=raw, buggy=after_cap)


def test_masked_slots_in_the_statistics() -> None:
    """A mean over all slots counts prompts and tool output; NaN there would make every metric NaN."""
    (batch,) = batches(1000)
    poison = torch.full_like(batch.rollout_logprobs, math.nan)
    poisoned = replace(batch, rollout_logprobs=torch.where(batch.loss_mask, batch.rollout_logprobs, poison))

    def over_all(source: PackedBatch) -> float:
        assert source.old_logprobs is not None
        return float((source.rollout_logprobs - source.old_logprobs).mean())

    def check(k1: Callable[[PackedBatch], float]) -> None:
        assert k1(poisoned) == pytest.approx(step_of([batch])["train/kl_rollout"])

    immune(check, ours=lambda source: step_of([source])["train/kl_rollout"], buggy=over_all)


def test_kl_logged_after_the_values_were_changed() -> None:
    """slime 2114: the array that was logged had been overwritten by then."""

    def logged(log_weights: Tensor) -> float:
        log_weights.clamp_(max=0.0)
        return float(-log_weights.mean())

    def raw(log_weights: Tensor) -> float:
        (batch,) = batches(1000)
        changed = torch.zeros_like(batch.rollout_logprobs)
        changed[batch.loss_mask] = log_weights.float()[: int(batch.loss_mask.sum())]
        return step_of([replace(batch, old_logprobs=changed, rollout_logprobs=torch.zeros_like(changed))])[
            "train/kl_rollout"
        ]

    def check(k1: Callable[[Tensor], float]) -> None:
        (batch,) = batches(1000)
        values = torch.linspace(-1, 2, int(batch.loss_mask.sum()), dtype=torch.float64)
        assert k1(values.clone()) == pytest.approx(-float(values.mean()), rel=1e-5)

    immune(check, ours=raw, buggy=logged)


def test_dropped_rollouts_missing_from_the_denominators() -> None:
    """rLLM 382, 442: success was over what survived the filters, so filtering more looked like success."""
    from swe_rl.config import AlgoConfig
    from swe_rl.sample_streams import with_credit
    from swe_rl.types import StopReason, TrajectoryGroup

    def group() -> TrajectoryGroup:
        from test_advantage_bugs import rollout

        members = [rollout("a", 1.0, group="g"), rollout("b", 0.0, group="g")]
        members += [replace(rollout(n, 0.0, group="g"), stop_reason=StopReason.MAX_TURNS) for n in ("c", "d")]
        return TrajectoryGroup(group_id="g", task_id="g", trajectories=members)

    def ours(found: TrajectoryGroup) -> float:
        return with_credit([found], AlgoConfig(stop_preset="rllm_main"), step=0, seed=0).metrics["rollout/success"]

    def survivors(found: TrajectoryGroup) -> float:
        kept = [t for t in found.trajectories if t.stop_reason is StopReason.SUBMITTED]
        return fmean(t.reward.value for t in kept if t.reward)

    def check(success: Callable[[TrajectoryGroup], float]) -> None:
        assert success(group()) == 0.25

    immune(check, ours=ours, buggy=survivors)
