"""Statistics of one optimiser step: summed on the device over micro-batches, then once over ranks.

Everything is made of raw values over trained tokens; a mean is taken only of the global sums. Names, units and
reductions of what comes out are in metric_table.py.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping

import torch
from torch import Tensor

from swe_rl.training import mesh
from swe_rl.types import PackedBatch, StepStats

VALUE_SUMS = ("value_error", "value_target", "value_target_squared", "num_values")  # PolicyModel sums these itself
SUMS = (
    *("loss", "num_loss_tokens", "num_tokens", "num_sample_tokens", "num_split_tokens"),
    *("entropy", "clipped_low", "clipped_high", "ratio"),
    *("k1", "k2", "k3", "weight", "weight_squared", "abs_diff", "advantage", "advantage_squared"),
    *("kl_ref", "num_ref_tokens", *VALUE_SUMS),
)
MAXIMA = ("abs_diff_max", "ratio_max")


class StepTotals:
    """Sums and maxima over trained tokens."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._maxima: list[Tensor] = []
        self._found: dict[str, float] = {}

    def add(self, batch: PackedBatch, loss: Tensor, stats: Mapping[str, Tensor], *, on_policy_data: bool) -> None:
        """One micro-batch. Without `on_policy_data` (supervised) there is no engine to drift from and no advantage:
        those stay 0."""
        logprobs, ratio, clipped = stats["logprobs"].double(), stats["ratio"].double(), stats["clipped"]
        size, sample_tokens = batch.num_tokens, batch.num_sample_tokens
        counts = {
            "num_loss_tokens": len(logprobs),
            "num_tokens": size,
            "num_sample_tokens": size if sample_tokens is None else sample_tokens,
            "num_split_tokens": 0 if batch.context_rows is None else size,
        }
        found: dict[str, Tensor] = {name: logprobs.new_tensor(float(count)) for name, count in counts.items()}
        found["loss"] = loss.double()
        found["entropy"] = stats["entropy"].double().sum()
        maxima = {name: logprobs.new_zeros(()) for name in MAXIMA}
        if on_policy_data:
            found["ratio"] = ratio.sum()
            found["clipped_low"] = (clipped & (ratio < 1)).double().sum()
            found["clipped_high"] = (clipped & (ratio >= 1)).double().sum()
            found |= _mismatch(batch, logprobs) | _moments(batch) | _reference(batch, logprobs)
            difference = (logprobs - _trained(batch, batch.rollout_logprobs)).abs()
            found["abs_diff"] = difference.sum()
            if len(logprobs):
                maxima = {"abs_diff_max": difference.max(), "ratio_max": ratio.max()}
        found |= {name: value.double() for name, value in stats.items() if name in VALUE_SUMS}
        zero = logprobs.new_zeros(())
        self._sums.append(torch.stack([found.get(name, zero).reshape(()) for name in SUMS]))
        self._maxima.append(torch.stack([maxima[name] for name in MAXIMA]))

    def reduce(self) -> None:
        """Over micro-batches and ranks. Collective; the only point at which the host waits for the device."""
        sums = mesh.all_reduce_sum(torch.stack(self._sums).sum(dim=0).tolist())
        maxima = mesh.all_reduce_max(torch.stack(self._maxima).amax(dim=0).tolist())
        self._found = dict(zip((*SUMS, *MAXIMA), (*sums, *maxima), strict=True))

    @property
    def num_loss_tokens(self) -> int:
        return int(self._found["num_loss_tokens"])

    def finish(
        self,
        *,
        step: int,
        policy_version: int,
        grad_norm: float,
        skipped: bool,
        seconds: float,
        peak_memory: int,
        group_norms: Mapping[str, float] | None = None,
    ) -> StepStats:
        """StepStats after reduce(). kl_rollout is K1, the mean of rollout - old logprobs."""
        sums, count = self._found, max(1, self.num_loss_tokens)
        details = {f"grad_norm/{name}": value for name, value in (group_norms or {}).items()}
        return StepStats(
            step=step,
            policy_version=policy_version,
            loss=sums["loss"],
            grad_norm=grad_norm,
            skipped=skipped,
            num_loss_tokens=self.num_loss_tokens,
            num_tokens=int(sums["num_tokens"]),
            entropy=sums["entropy"] / count,
            ratio_clip_frac=(sums["clipped_low"] + sums["clipped_high"]) / count,
            kl_rollout=sums["k1"] / count,
            logprob_abs_diff=sums["abs_diff"] / count,
            tokens_per_s=sums["num_tokens"] / seconds if seconds > 0 else 0.0,
            peak_memory_bytes=peak_memory,
            details={**_details(sums, count), **details},
        )


def _trained(batch: PackedBatch, column: Tensor) -> Tensor:
    """The trained slots of a [T] column in fp64: masked ones may hold anything."""
    return column[batch.loss_mask].double()


def _mismatch(batch: PackedBatch, logprobs: Tensor) -> dict[str, Tensor]:
    """Of w = p_old / p_engine, raw: no clamp and no cap of a correction has touched it. Where the engine is the old
    policy (algo.old_policy=rollout), w would be 1 whatever happens: then it is of the policy at hand."""
    engine = _trained(batch, batch.rollout_logprobs)
    old = logprobs if batch.old_logprobs is None else _trained(batch, batch.old_logprobs)
    old = torch.where((old == engine).all(), logprobs, old)
    log_weight = old - engine
    weight = log_weight.exp()
    return {
        "k1": -log_weight.sum(),
        "k2": 0.5 * log_weight.square().sum(),
        "k3": (weight - 1 - log_weight).sum(),
        "weight": weight.sum(),
        "weight_squared": weight.square().sum(),
    }


def _moments(batch: PackedBatch) -> dict[str, Tensor]:
    advantages = _trained(batch, batch.advantages)
    return {"advantage": advantages.sum(), "advantage_squared": advantages.square().sum()}


def _reference(batch: PackedBatch, logprobs: Tensor) -> dict[str, Tensor]:
    if batch.ref_logprobs is None:
        return {}
    delta = _trained(batch, batch.ref_logprobs) - logprobs
    return {"kl_ref": (delta.exp() - 1 - delta).sum(), "num_ref_tokens": logprobs.new_tensor(float(len(logprobs)))}


def _details(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """What is not a field of StepStats, by the name of its metric."""
    mean = sums["advantage"] / count
    found = {
        "train/clip_frac_low": sums["clipped_low"] / count,
        "train/clip_frac_high": sums["clipped_high"] / count,
        "train/ratio_mean": sums["ratio"] / count,
        "train/ratio_max": sums["ratio_max"],
        "train/tree_token_ratio": sums["num_sample_tokens"] / max(1.0, sums["num_tokens"]),
        "train/context_split_frac": sums["num_split_tokens"] / max(1.0, sums["num_tokens"]),
        "train/mismatch_k2": sums["k2"] / count,
        "train/mismatch_k3": sums["k3"] / count,
        "train/mismatch_ess": sums["weight"] ** 2 / (count * sums["weight_squared"]) if sums["weight_squared"] else 0.0,
        "train/logprob_abs_diff_max": sums["abs_diff_max"],
        "train/advantage_mean": mean,
        "train/advantage_std": math.sqrt(max(0.0, sums["advantage_squared"] / count - mean**2)),
    }
    if sums["num_ref_tokens"]:
        found["train/kl_ref"] = sums["kl_ref"] / sums["num_ref_tokens"]
    if sums["num_values"]:
        number = sums["num_values"]
        error = sums["value_error"] / number
        spread = sums["value_target_squared"] / number - (sums["value_target"] / number) ** 2
        found["train/value_error"] = error
        found["train/value_explained_variance"] = 1.0 - error / spread if spread > 1e-12 else 0.0
    return found


def step_metrics(stats: StepStats) -> dict[str, float]:
    """One optimiser step as metrics by name."""
    return {
        "train/loss": stats.loss,
        "train/grad_norm": stats.grad_norm,
        "train/skipped": float(stats.skipped),
        "train/entropy": stats.entropy,
        "train/ratio_clip_frac": stats.ratio_clip_frac,
        "train/kl_rollout": stats.kl_rollout,
        "train/logprob_abs_diff": stats.logprob_abs_diff,
        "train/num_loss_tokens": float(stats.num_loss_tokens),
        "train/num_tokens": float(stats.num_tokens),
        "train/tokens_per_s": stats.tokens_per_s,
        "train/peak_memory_bytes": float(stats.peak_memory_bytes),
        **stats.details,
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Largest device allocation on a GPU, largest resident size of this process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
