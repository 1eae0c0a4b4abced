"""What a whole trajectory decides for each of its tokens: GSPO's ratio, and corrections of the trainer/engine mismatch.

w_t = p_old(token t) / p_engine(token t), a constant. A trajectory is one sequence, however many samples it has.
Products are taken in logs and clamped to +-20 nats. Sources: sequence-level truncation (Yao et al. 2025), rejection
(Liu et al. 2025), the geometric mean (verl), GSPO (arXiv:2507.18071).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from swe_rl.errors import ConfigError, InvariantError
from swe_rl.ops.token_loss import MAX_LOG_RATIO
from swe_rl.types import PackedBatch, TrainSample


def sequence_coefficient(log_weights: Sequence[float], correction: str, *, low: float, cap: float) -> float:
    """The factor of every token of a trajectory whose trained tokens have log w_t = log_weights; 1 without a token.

    sequence_tis: min(prod w, cap). sequence_mask: prod w where it lies in [low, cap], else 0 (MIS). geometric_mask: 1
    where the geometric mean of w lies in [low, cap], else 0; it does not depend on the length, while a product rejects
    long trajectories first. Raises ConfigError for another name, InvariantError for a weight that is not finite.
    """
    if not log_weights:
        return 1.0
    total = math.fsum(log_weights)
    if not math.isfinite(total):
        raise InvariantError("a trained token has no finite logprob, by the trainer or by the engine")
    if correction == "geometric_mask":
        return float(low <= _exp(total / len(log_weights)) <= cap)
    product = _exp(total)
    if correction == "sequence_tis":
        return min(product, cap)
    if correction == "sequence_mask":
        return product if low <= product <= cap else 0.0
    raise ConfigError(f"algo.correction={correction!r} is no correction of whole sequences")


def with_sequence_coeff(
    samples: Sequence[TrainSample], correction: str, *, low: float, cap: float
) -> tuple[list[TrainSample], int]:
    """(samples with `sequence_coeff` from their old and rollout logprobs, number of trajectories with factor 0)."""
    logs: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        pairs = zip(sample.old_logprobs, sample.rollout_logprobs, sample.loss_mask, strict=True)
        logs[sample.trajectory_id] += [old - rollout for old, rollout, trains in pairs if trains]
    factors = {name: sequence_coefficient(values, correction, low=low, cap=cap) for name, values in logs.items()}
    filled = [replace(s, sequence_coeff=[factors[s.trajectory_id]] * len(s.input_ids)) for s in samples]
    return filled, sum(factor == 0 for factor in factors.values())


def without_rejected(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples without those whose sequence_coeff is 0, so that no denominator counts them either."""
    return [s for s in samples if not s.sequence_coeff or s.sequence_coeff[0] != 0.0]


def gspo_old(batches: Sequence[PackedBatch], current: Sequence[Tensor]) -> list[PackedBatch]:
    """The batches with `ratio_old_logprobs` that turn PPO's token ratio into GSPO's.

    With s_i = exp(mean over trained t of (current - old)), token t gets current_t - log s_i in place of old_t: its
    ratio is then sg(s_i) p(t) / sg(p(t)), the token form of GSPO, whose value is s_i and whose gradient is s_i grad log
    p(t). current [T] per batch are the logprobs of the weights at hand. Raises InvariantError for a batch without
    old_logprobs.
    """
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for batch, logprobs in zip(batches, current, strict=True):
        for name, part in _documents(batch):
            chosen = batch.loss_mask[part]
            old = _old(batch)[part][chosen].double()
            sums[name] += float((logprobs[part][chosen].double() - old).sum())
            counts[name] += int(chosen.sum())
    shift = {name: _clamped(sums[name] / counts[name]) if counts[name] else 0.0 for name in sums}
    return [
        replace(batch, ratio_old_logprobs=_anchored(batch, logprobs, shift))
        for batch, logprobs in zip(batches, current, strict=True)
    ]


def _anchored(batch: PackedBatch, logprobs: Tensor, shift: Mapping[str, float]) -> Tensor:
    anchored = logprobs.clone()
    for name, part in _documents(batch):
        anchored[part] -= shift[name]
    return anchored


def _documents(batch: PackedBatch) -> list[tuple[str, slice]]:
    bounds = batch.sample_bounds
    return [(name, slice(bounds[i], bounds[i + 1])) for i, name in enumerate(batch.trajectory_ids)]


def _old(batch: PackedBatch) -> Tensor:
    if batch.old_logprobs is None:
        raise InvariantError("GSPO needs old_logprobs: score the batch before its first optimiser step")
    return batch.old_logprobs


def _clamped(value: float) -> float:
    return max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, value))


def _exp(value: float) -> float:
    return math.exp(_clamped(value))
