"""Credit within one group of rollouts of the same task: pure functions of numbers.

Groups are ragged: what matters is who is left, never the configured size. So the baseline stays unbiased when outages
took members. Where all agree there is no signal: zeros. What a single member gets is `singleton`'s to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from swe_rl.errors import ConfigError, InvariantError
from swe_rl.types import TrajectoryGroup

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r_j, j != i) (RLOO, arXiv:2402.14740). Zero for all when they agree, and for a single one."""
    total, size = math.fsum(rewards), len(rewards)
    if size < 2 or min(rewards) == max(rewards):
        return [0.0] * size
    return [r - (total - r) / (size - 1) for r in rewards]


def group_normalized(rewards: Sequence[float], *, normalize_std: bool) -> list[float]:
    """A_i = r_i - mean (Dr.GRPO, arXiv:2503.20783), divided by the sample std + 1e-6 if asked (GRPO, arXiv:2402.03300).

    The sample std has denominator G - 1. Zero for all when rewards agree, and for a single member.
    """
    size = len(rewards)
    if size < 2 or min(rewards) == max(rewards):
        return [0.0] * size
    mean = math.fsum(rewards) / size
    centred = [r - mean for r in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (size - 1))
    return [c / (std + STD_EPSILON) for c in centred]


def whitened(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """(v - mean) / sqrt(var + 1e-8) over a batch in which value i stands for weights[i] tokens (REINFORCE++,
    arXiv:2501.03262). var has denominator n - 1. Zero for all when fewer than two tokens train or all values agree."""
    counted = [v for v, n in zip(values, weights, strict=True) if n]
    total = sum(weights)
    if total < 2 or min(counted) == max(counted):
        return [0.0] * len(values)
    mean = math.fsum(v * n for v, n in zip(values, weights, strict=True)) / total
    variance = math.fsum(n * (v - mean) ** 2 for v, n in zip(values, weights, strict=True)) / (total - 1)
    return [(v - mean) / math.sqrt(variance + WHITEN_EPSILON) for v in values]


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "leave_one_out": leave_one_out,
    "group_mean": lambda rewards: group_normalized(rewards, normalize_std=False),
    "group_std": lambda rewards: group_normalized(rewards, normalize_std=True),
    # whitened over the batch afterwards: algorithms.credit
    "reinforce_pp": lambda rewards: group_normalized(rewards, normalize_std=False),
}


def group_advantages(rewards: Sequence[float], mode: str, *, singleton: str = "zero") -> list[float]:
    """Advantages [G] of these rewards. A group of one gets 0, or its reward with singleton="reward" (no baseline).

    Raises ConfigError for an unknown mode or rule.
    """
    if mode not in ADVANTAGES:
        raise ConfigError(f"algo.advantage={mode!r} is unknown: use one of {', '.join(ADVANTAGES)}")
    if singleton not in ("zero", "reward"):
        raise ConfigError(f"algo.singleton={singleton!r} is unknown: use one of zero, reward")
    if len(rewards) == 1 and singleton == "reward":
        return [rewards[0]]
    return ADVANTAGES[mode](rewards)


def compute_advantages(group: TrajectoryGroup, mode: str, *, singleton: str = "zero") -> list[float]:
    """Advantages [G] of the group's trajectories by their rewards, masked ones included in the baseline.

    Raises ConfigError for an unknown mode, InvariantError for a member without a finite reward (filter_group removes
    those: an outage is never a reward).
    """
    rewards: list[float] = []
    for trajectory in group.trajectories:
        if trajectory.reward is None or not math.isfinite(trajectory.reward.value):
            raise InvariantError(
                f"trajectory {trajectory.trajectory_id} has no finite reward but is still in its group"
            )
        rewards.append(trajectory.reward.value)
    return group_advantages(rewards, mode, singleton=singleton)
