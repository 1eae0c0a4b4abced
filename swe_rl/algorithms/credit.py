"""From groups of rollouts to advantages per turn: penalties, filters, baselines, whitening, signs, in this order.

What a rollout is worth to the algorithm is its reward plus penalties "in the reward"; what it achieved (Reward.solved)
is never touched. Everything here is a pure function; sums over ranks are the caller's (`gather`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swe_rl.algorithms.advantages import group_advantages, whitened
from swe_rl.algorithms.filters import filter_group, is_masked, plain_reward
from swe_rl.algorithms.penalties import length_of, soft_overlong
from swe_rl.algorithms.turns import generalized_advantages, turn_level, turn_states
from swe_rl.config import AlgoConfig
from swe_rl.config.stop_presets import stop_map
from swe_rl.errors import InvariantError
from swe_rl.types import Trajectory, TrajectoryGroup

Gather = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the trainer says about one rollout before it gets credit."""

    values: list[float] = field(default_factory=list)  # V before each turn; with advantage=gae
    kl: float = 0.0  # sum over its sampled tokens of the KL estimate to the reference, nats; with kl_in=reward
    turn_rewards: list[float] = field(default_factory=list)  # beside the one at the end; with reward.potential_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """One rollout of the batch with what each of its turns is worth."""

    trajectory: Trajectory
    advantages: list[float]  # per turn
    trained: bool  # False: it stays a row of the batch, but none of its tokens trains
    value_targets: list[float] = field(default_factory=list)  # per turn; with advantage=gae


def shaped_reward(trajectory: Trajectory, algo: AlgoConfig, scores: Mapping[str, Scores]) -> float:
    """`worth` less the KL to the reference where that belongs into the reward; NaN without a reward."""
    value = worth(trajectory, algo)
    if algo.kl_coeff and algo.kl_in == "reward":
        value -= algo.kl_coeff * scores[trajectory.trajectory_id].kl
    return value


def worth(trajectory: Trajectory, algo: AlgoConfig) -> float:
    """The reward with the over-long penalty where that belongs into it; NaN without a reward. Groups whose members are
    all worth the same are uniform, unless algo.uniform_by=reward (a KL penalty hardly ever is the same: it does not
    count here)."""
    penalty = overlong_penalty(trajectory, algo) if algo.length_penalty_on == "reward" else 0.0
    return plain_reward(trajectory) + penalty


def overlong_penalty(trajectory: Trajectory, algo: AlgoConfig) -> float:
    """0 or negative: the soft over-long penalty as configured."""
    if algo.length_penalty == "none":
        return 0.0
    return soft_overlong(
        length_of(trajectory, algo.length_penalty),
        start=algo.length_penalty_start,
        end=algo.length_penalty_end,
        scale=algo.length_penalty_scale,
    )


def informative(group: TrajectoryGroup, algo: AlgoConfig) -> bool:
    """Whether the group stays in the batch: what dynamic sampling counts before it asks for more."""
    return _filtered(group, algo)[0].dropped is None


def assign_credit(
    groups: Sequence[TrajectoryGroup],
    algo: AlgoConfig,
    *,
    scores: Mapping[str, Scores] | None = None,
    gather: Gather = list,
) -> tuple[list[Credit], Counter[str]]:
    """Credit of every rollout that stays in the batch, in order, and the counts of filter_group.

    `scores` by trajectory id where the algorithm needs them; `gather` concatenates lists over ranks (whitening is over
    the batch of all ranks; collective with advantage=reinforce_pp only). Raises InvariantError for two groups of one
    id, KeyError for a missing score.
    """
    found = scores or {}
    ids = Counter(group.group_id for group in groups)
    if repeated := [name for name, count in ids.items() if count > 1]:
        raise InvariantError(f"two groups of this batch are called {repeated[0]}: a baseline would mix them")
    counts: Counter[str] = Counter()
    credits: list[Credit] = []
    for group in groups:
        kept, seen = _filtered(group, algo)
        counts.update(seen)
        if kept.dropped is None:
            credits += _group_credit(kept.trajectories, algo, found)
    if algo.advantage == "reinforce_pp":
        credits = _whiten(credits, gather)
    if algo.length_penalty_on == "advantage":
        credits = [_shifted(credit, overlong_penalty(credit.trajectory, algo)) for credit in credits]
    if algo.negative_scale != 1:
        credits = [_asymmetric(credit, algo.negative_scale) for credit in credits]
    return credits, counts


def trained_tokens(credit: Credit) -> int:
    """Tokens of the rollout that train: sampled ones with a finite logprob, as batching.to_samples masks them."""
    if not credit.trained:
        return 0
    logprobs = (value for turn in credit.trajectory.turns for value in turn.completion.rollout_logprobs)
    return sum(map(math.isfinite, logprobs))


def _filtered(group: TrajectoryGroup, algo: AlgoConfig) -> tuple[TrajectoryGroup, Counter[str]]:
    return filter_group(
        group,
        stop_reasons=stop_map(algo),
        drop_uniform=algo.drop_uniform_groups,
        value_of=plain_reward if algo.uniform_by == "reward" else lambda trajectory: worth(trajectory, algo),
    )


def _group_credit(members: Sequence[Trajectory], algo: AlgoConfig, scores: Mapping[str, Scores]) -> list[Credit]:
    rewards = [shaped_reward(member, algo, scores) for member in members]
    reasons = stop_map(algo)
    targets: list[list[float]] = [[] for _ in members]
    if algo.advantage == "gae":
        pairs = [
            generalized_advantages(
                _per_turn(member, reward, scores[member.trajectory_id].turn_rewards),
                scores[member.trajectory_id].values,
                gamma=algo.gamma,
                lam=algo.gae_lambda,
            )
            for member, reward in zip(members, rewards, strict=True)
        ]
        per_turn, targets = [a for a, _ in pairs], [t for _, t in pairs]
    elif algo.advantage == "turn_level" and len(members) > 1:
        per_turn = turn_level(rewards, [turn_states(member) for member in members])
    else:
        mode = "leave_one_out" if algo.advantage == "turn_level" else algo.advantage
        scalars = group_advantages(rewards, mode, singleton=algo.singleton)
        per_turn = [[a] * len(member.turns) for a, member in zip(scalars, members, strict=True)]
    return [
        Credit(trajectory=member, advantages=values, trained=not is_masked(member, reasons), value_targets=target)
        for member, values, target in zip(members, per_turn, targets, strict=True)
    ]


def _per_turn(member: Trajectory, reward: float, added: Sequence[float]) -> list[float]:
    """Reward after each turn: `reward` after the last one, and what is `added` to each of them."""
    found = list(added) or [0.0] * len(member.turns)
    return [*found[:-1], found[-1] + reward] if found else []


def _whiten(credits: Sequence[Credit], gather: Gather) -> list[Credit]:
    """Over the trained tokens of all ranks. A rollout without a turn has no token."""
    own = [(credit.advantages[0] if credit.advantages else 0.0, trained_tokens(credit)) for credit in credits]
    parts = gather([own])
    flat = [pair for part in parts for pair in part]
    values = whitened([value for value, _ in flat], [count for _, count in flat])
    # Equal inputs have equal outputs, so this rank finds its own again whatever the order of ranks.
    by_value = dict(zip([value for value, _ in flat], values, strict=True))
    return [
        replace(credit, advantages=[by_value[value]] * len(credit.advantages))
        for credit, (value, _) in zip(credits, own, strict=True)
    ]


def _shifted(credit: Credit, penalty: float) -> Credit:
    return replace(credit, advantages=[value + penalty for value in credit.advantages])


def _asymmetric(credit: Credit, scale: float) -> Credit:
    return replace(credit, advantages=[value if value > 0 else scale * value for value in credit.advantages])
