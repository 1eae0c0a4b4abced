"""Credit of single turns: leave-one-out at states that siblings share, and GAE with a value per turn."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import defaultdict
from collections.abc import Sequence

from swe_rl.algorithms.advantages import leave_one_out
from swe_rl.errors import InvariantError
from swe_rl.types import Trajectory


def turn_states(trajectory: Trajectory) -> list[bytes]:
    """One name per turn for what the policy saw when it began to sample: equal names, equal token ids."""
    seen: list[int] = []
    names: list[bytes] = []
    for turn in trajectory.turns:
        if turn.kept_context is not None:
            del seen[turn.kept_context :]
        seen.extend(turn.context_ids)
        names.append(hashlib.blake2b(array("q", seen).tobytes(), digest_size=16).digest())
        seen.extend(turn.completion.token_ids)
    return names


def turn_level(rewards: Sequence[float], states: Sequence[Sequence[bytes]]) -> list[list[float]]:
    """Advantages [G][turns]: A_it = r_i - mean(r_j over the others that were in the state of turn t as well).

    rewards [G] come at the end of an episode, states [G][turns] are those of `turn_states`. Where nobody else was in
    the state, the baseline is the mean over all others, which makes A_it the advantage of `leave_one_out`.
    Unbiased: a baseline depends on the state and on other rollouts, never on what is sampled there. A baseline per
    turn INDEX over those still running is not: with k left the pull on a turn shrinks by (k - 1) / k, so late turns
    count less, which is a hidden length penalty; and it compares states that have nothing in common.
    Zero for a single member.
    """
    whole = leave_one_out(rewards)
    visitors: dict[bytes, dict[int, float]] = defaultdict(dict)
    for member, names in enumerate(states):
        for name in names:
            visitors[name][member] = rewards[member]
    return [
        [_against(member, rewards[member], visitors[name], whole[member]) for name in names]
        for member, names in enumerate(states)
    ]


def _against(member: int, reward: float, visitors: dict[int, float], alone: float) -> float:
    others = [value for other, value in visitors.items() if other != member]
    return reward - math.fsum(others) / len(others) if others else alone


def generalized_advantages(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """(advantages [turns], value targets [turns]) of one episode, GAE (arXiv:1506.02438) with a turn as the step.

    rewards[t] follow turn t, values[t] = V(state before turn t); the state after the last turn is worth 0.
    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; target_t = A_t + V_t.
    Raises InvariantError when the two differ in length or a value is not finite.
    """
    if len(rewards) != len(values) or not all(map(math.isfinite, values)):
        raise InvariantError(f"GAE needs one finite value per turn: {len(values)} values for {len(rewards)} turns")
    advantages, following, after = [0.0] * len(values), 0.0, 0.0
    for turn in reversed(range(len(values))):
        delta = rewards[turn] + gamma * after - values[turn]
        following = delta + gamma * lam * following
        advantages[turn], after = following, values[turn]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]
