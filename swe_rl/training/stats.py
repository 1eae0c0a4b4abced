"""Statistics of one optimiser step: summed on the device over micro-batches, then once over ranks."""

from __future__ import annotations

import resource

import torch
from torch import Tensor

from swe_rl.training import mesh
from swe_rl.types import PackedBatch, StepStats

NAMES = ("loss", "num_loss_tokens", "num_tokens", "entropy", "clipped", "kl_rollout", "abs_diff")


class StepTotals:
    """Sums over trained tokens; a mean is taken only of the global sums."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._sums: dict[str, float] = {}

    def add(self, batch: PackedBatch, loss: Tensor, stats: dict[str, Tensor], *, on_policy_data: bool) -> None:
        """One micro-batch. Without `on_policy_data` (supervised) there is no drift from an engine: it stays 0."""
        logprobs = stats["logprobs"].double()
        drift = logprobs.new_zeros(2)
        if on_policy_data:
            rollout = batch.rollout_logprobs[batch.loss_mask].double()
            old = logprobs if batch.old_logprobs is None else batch.old_logprobs[batch.loss_mask].double()
            drift = torch.stack([(rollout - old).sum(), (logprobs - rollout).abs().sum()])
        counts = logprobs.new_tensor([len(logprobs), len(batch.input_ids) if any(batch.trajectory_ids) else 0])
        means = torch.stack([stats["entropy"].double().sum(), stats["clipped"].double().sum()])
        self._parts.append(torch.cat([loss.double().reshape(1), counts, means, drift]))

    def reduce(self) -> None:
        """Sums over micro-batches and ranks. Collective; the only point at which the host waits for the device."""
        local = torch.stack(self._parts).sum(dim=0).tolist()
        self._sums = dict(zip(NAMES, mesh.all_reduce_sum(local), strict=True))

    @property
    def num_loss_tokens(self) -> int:
        return int(self._sums["num_loss_tokens"])

    def finish(
        self, *, step: int, policy_version: int, grad_norm: float, skipped: bool, seconds: float, peak_memory: int
    ) -> StepStats:
        """StepStats after reduce(). kl_rollout is K1, the mean of rollout - old logprobs."""
        sums, count = self._sums, max(1, self.num_loss_tokens)
        return StepStats(
            step=step,
            policy_version=policy_version,
            loss=sums["loss"],
            grad_norm=grad_norm,
            skipped=skipped,
            num_loss_tokens=self.num_loss_tokens,
            num_tokens=int(sums["num_tokens"]),
            entropy=sums["entropy"] / count,
            ratio_clip_frac=sums["clipped"] / count,
            kl_rollout=sums["kl_rollout"] / count,
            logprob_abs_diff=sums["abs_diff"] / count,
            tokens_per_s=sums["num_tokens"] / seconds if seconds > 0 else 0.0,
            peak_memory_bytes=peak_memory,
        )


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
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Largest device allocation on a GPU, largest resident size of this process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
