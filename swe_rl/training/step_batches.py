"""From the samples of one optimiser step to packed rows that carry all that the loss needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swe_rl.algorithms.aggregation import count_rows, count_tokens, token_weights
from swe_rl.batching import pack
from swe_rl.config import PhaseConfig, TrainConfig
from swe_rl.training import mesh
from swe_rl.types import PackedBatch, TrainSample


def micro_batches(samples: Sequence[TrainSample], phase: PhaseConfig, cfg: TrainConfig) -> list[PackedBatch]:
    """This rank's packed rows of one step, weighed and with the old policy they need. Collective."""
    packed = pack(weigh(samples, cfg), max_tokens=cfg.batching.max_tokens_per_batch)
    return behaviour(packed, cfg, phase)


def weigh(samples: Sequence[TrainSample], cfg: TrainConfig) -> list[TrainSample]:
    """Fills token weights with denominators that are global over ranks and micro-batches. Collective."""
    mode = cfg.algo.aggregation
    rows, tokens = mesh.all_reduce_sum([count_rows(samples, mode), count_tokens(samples)])
    return token_weights(
        samples,
        mode,
        max_tokens=cfg.agent.max_context_tokens,
        num_rows_global=int(rows),
        num_tokens_global=int(tokens),
    )


def behaviour(batches: Sequence[PackedBatch], cfg: TrainConfig, phase: PhaseConfig) -> list[PackedBatch]:
    """The batches with the old policy they need. Asynchronous rollouts come from older weights: the old policy is the
    one of their engine logprobs (bypass mode: the ratio covers staleness). Synchronous: one step per batch, so the old
    policy is the current one."""
    if phase.data != "rollouts" or cfg.rollout.max_staleness == 0:
        return list(batches)
    return [replace(batch, old_logprobs=batch.rollout_logprobs) for batch in batches]
