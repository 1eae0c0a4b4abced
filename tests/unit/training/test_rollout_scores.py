"""What the trainer says about rollouts before they get credit, by a backend that looks its numbers up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from swe_rl.config import AlgoConfig, BatchingConfig, TrainConfig
from swe_rl.training.rollout_scores import needs_scores, rollout_scores
from swe_rl.types import Completion, PackedBatch, StopReason, Trajectory, Turn

REF = -1.5


class Reference:
    """Every trained token has the logprob REF by the reference; nothing else has one."""

    def ref_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        return [torch.where(batch.loss_mask, REF, math.nan) for batch in batches]

    def values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        raise AssertionError("no value is asked for")


def rollout(name: str, turns: Sequence[Sequence[float]], stop: StopReason = StopReason.SUBMITTED) -> Trajectory:
    """One turn per list of engine logprobs, each after a context of three ids."""
    completions = [
        Completion(
            token_ids=[5] * len(logprobs),
            rollout_logprobs=list(logprobs),
            finish_reason="stop",
            policy_version=0,
            policy_version_max=0,
        )
        for logprobs in turns
    ]
    return Trajectory(
        trajectory_id=name,
        task_id="t",
        group_id="g",
        rollout_index=0,
        turns=[Turn(context_ids=[1, 2, 3], completion=c, tool_call=None, observation="") for c in completions],
        stop_reason=stop,
        temperature=1.0,
    )


@pytest.mark.parametrize(
    ("estimator", "each"),  # of d = -0.5 + 1.5 = 1
    [("k1", 1.0), ("k2", 0.5), ("k3", math.exp(-1.0))],
)
@pytest.mark.parametrize("max_tokens", [8, 64])
def test_kl_is_the_sum_over_the_sampled_tokens_of_a_rollout(estimator: str, each: float, max_tokens: int) -> None:
    """Also of a rollout that will be masked; not of tokens without a finite logprob, nor of context."""
    algo = AlgoConfig(kl_coeff=0.1, kl_in="reward", kl_estimator=estimator)
    cfg = TrainConfig(algo=algo, batching=BatchingConfig(max_tokens_per_batch=max_tokens))
    assert needs_scores(cfg)
    rollouts = [
        rollout("two", [[-0.5, -0.5], [-0.5]]),
        rollout("masked", [[-0.5] * 5], StopReason.MAX_TURNS),
        rollout("part", [[-0.5, -math.inf]]),
        rollout("nothing", []),
    ]
    found = rollout_scores(rollouts, cfg, backend=Reference())
    assert {name: score.kl for name, score in found.items()} == pytest.approx(
        {"two": 3 * each, "masked": 5 * each, "part": each, "nothing": 0.0}
    )
