"""Potential-based shaping: credit for getting closer, which leaves the best policy what it was.

With a potential Phi of what the policy has seen, turn t is given F_t = gamma Phi(h_{t+1}) - Phi(h_t) more, and Phi is 0
after the end. The sum of discounted F from turn t on is -Phi(h_t), whatever is done there: the order of actions, hence
the optimum, is unchanged (Ng, Harada and Russell, ICML 1999, theorem 1). So it changes nothing for an algorithm with
one advantage per trajectory, and moves credit between turns for one that has rewards per turn.

Here Phi(h) is the fraction of the visible tests that passed when the agent last ran them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from swe_rl.rewards.shaping import runs_tests
from swe_rl.types import Trajectory, Turn

_COUNT = re.compile(r"\b(\d+) (passed|failed|errors?)\b")


def shaping_rewards(potentials: Sequence[float], *, gamma: float) -> list[float]:
    """F per turn [T] from the potential before each turn [T]; the potential after the last one is 0."""
    after = [*potentials[1:], 0.0] if potentials else []
    return [gamma * following - before for before, following in zip(potentials, after, strict=True)]


def visible_potentials(trajectory: Trajectory) -> list[float]:
    """Potential before each turn, between 0 and 1: 0 until the agent has run tests."""
    found, now = [], 0.0
    for turn in trajectory.turns:
        found.append(now)
        now = _passed_fraction(turn, now)
    return found


def _passed_fraction(turn: Turn, before: float) -> float:
    if turn.tool_call is None or not runs_tests(turn.tool_call):
        return before
    counts = {"passed": 0, "failed": 0}
    for number, what in _COUNT.findall(turn.observation):
        counts["passed" if what == "passed" else "failed"] += int(number)
    total = sum(counts.values())
    return counts["passed"] / total if total else before


def turn_rewards(trajectory: Trajectory, value: float, *, weight: float, gamma: float) -> list[float]:
    """Reward per turn [T]: `value` after the last one, and `weight` times the shaping everywhere."""
    shaped = [weight * extra for extra in shaping_rewards(visible_potentials(trajectory), gamma=gamma)]
    return [*shaped[:-1], shaped[-1] + value] if shaped else []
