"""Which rollouts of a group may teach, and how: a map from stop reason to keep, mask or drop.

keep: trains. mask: its tokens do not train, its reward stays in the baseline and its row in the denominators.
drop: as if it had never been sampled. Infrastructure failures and unscored rollouts are always dropped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from swe_rl.errors import ConfigError
from swe_rl.types import Trajectory, TrajectoryGroup

Action = Literal["keep", "mask", "drop"]
ACTIONS: tuple[Action, ...] = ("keep", "mask", "drop")


def stop_action(trajectory: Trajectory, stop_reasons: Mapping[str, str]) -> Action:
    """What the map says about this trajectory; reasons not named are kept, outages are dropped."""
    if trajectory.stop_reason.is_infra:
        return "drop"
    action = stop_reasons.get(str(trajectory.stop_reason), "keep")
    for known in ACTIONS:
        if action == known:
            return known
    raise ConfigError(
        f"algo.stop_reasons.{trajectory.stop_reason}={action!r} is unknown: use one of {', '.join(ACTIONS)}"
    )


def is_masked(trajectory: Trajectory, stop_reasons: Mapping[str, str]) -> bool:
    """True if the trajectory counts in its group, but none of its tokens trains."""
    return stop_action(trajectory, stop_reasons) == "mask"


def plain_reward(trajectory: Trajectory) -> float:
    """The reward as graded; NaN without one."""
    return math.nan if trajectory.reward is None else trajectory.reward.value


def filter_group(
    group: TrajectoryGroup,
    *,
    stop_reasons: Mapping[str, str],
    drop_uniform: bool,
    value_of: Callable[[Trajectory], float] = plain_reward,
) -> tuple[TrajectoryGroup, Counter[str]]:
    """Removes what may not count and says what happened.

    `value_of` is what the advantage will be made of: the reward, or the reward with a penalty. Equal values make a
    group uniform. Returns the group with the remaining trajectories (`dropped` set to "empty" or "uniform" when
    the whole group leaves) and counts: infra, unscored, dropped, masked (trajectories); filtered_<reason> (dropped or
    masked by the map); singleton, uniform, solve_none, solve_all, solve_partial (groups, of the remaining members).
    A singleton stays.
    """
    counts: Counter[str] = Counter()
    kept: list[Trajectory] = []
    for trajectory in group.trajectories:
        action = stop_action(trajectory, stop_reasons)
        if trajectory.stop_reason.is_infra:
            counts["infra"] += 1
            continue
        counts[f"filtered_{trajectory.stop_reason}"] += action != "keep"
        if action == "drop":
            counts["dropped"] += 1
        elif not math.isfinite(plain_reward(trajectory)):
            counts["unscored"] += 1
        else:
            counts["masked"] += action == "mask"
            kept.append(trajectory)
    dropped = _describe(kept, counts, drop_uniform=drop_uniform, value_of=value_of)
    return replace(group, trajectories=kept, dropped=dropped), +counts


def _describe(
    kept: list[Trajectory], counts: Counter[str], *, drop_uniform: bool, value_of: Callable[[Trajectory], float]
) -> str | None:
    if not kept:
        return "empty"
    values = [value_of(t) for t in kept]
    solved = sum(t.reward.solved for t in kept if t.reward is not None)
    counts["solve_none" if not solved else "solve_all" if solved == len(kept) else "solve_partial"] += 1
    counts["singleton"] += len(values) == 1
    uniform = min(values) == max(values)
    counts["uniform"] += uniform
    return "uniform" if uniform and drop_uniform else None
