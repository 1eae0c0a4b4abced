from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from swe_rl.algorithms import compute_advantages, filter_group, is_masked, stop_action
from swe_rl.errors import ConfigError
from swe_rl.types import Reward, StopReason, Trajectory, TrajectoryGroup

Member = tuple[StopReason, float | None]
SUBMITTED, TIMEOUT, INFRA = StopReason.SUBMITTED, StopReason.TIMEOUT, StopReason.INFRA_ERROR


def trajectory(reason: StopReason, reward: float | None, index: int = 0) -> Trajectory:
    return Trajectory(
        trajectory_id=f"t{index}",
        task_id="task",
        group_id="g",
        rollout_index=index,
        turns=[],
        stop_reason=reason,
        temperature=1.0,
        reward=None if reward is None else Reward(value=reward),
    )


def make(members: Sequence[Member]) -> TrajectoryGroup:
    trajectories = [trajectory(reason, reward, i) for i, (reason, reward) in enumerate(members)]
    return TrajectoryGroup(group_id="g", task_id="task", trajectories=trajectories)


WORKED = [(SUBMITTED, 1.0), (SUBMITTED, 0.0), (SUBMITTED, 0.0), (TIMEOUT, 0.0)]


def test_mask_keeps_the_baseline_and_drop_changes_it() -> None:
    """Rewards (1, 0, 0, 0): masked in the group the failures get -1/3, dropped from it -1/2."""
    masked, counts = filter_group(make(WORKED), stop_reasons={"timeout": "mask"}, drop_uniform=False)
    assert len(masked.trajectories) == 4
    assert compute_advantages(masked, "leave_one_out") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert [is_masked(t, {"timeout": "mask"}) for t in masked.trajectories] == [False, False, False, True]
    assert (counts["masked"], counts["dropped"], counts["solve_partial"]) == (1, 0, 1)

    dropped, counts = filter_group(make(WORKED), stop_reasons={"timeout": "drop"}, drop_uniform=False)
    assert compute_advantages(dropped, "leave_one_out") == pytest.approx([1, -1 / 2, -1 / 2])
    assert (counts["masked"], counts["dropped"]) == (0, 1)


@pytest.mark.parametrize("action", ["keep", "mask", "drop"])
def test_outages_leave_whatever_the_map_says(action: str) -> None:
    group = make([(SUBMITTED, 1.0), (INFRA, None), (INFRA, 0.0), (StopReason.CANCELLED, None), (SUBMITTED, 0.0)])
    kept, counts = filter_group(group, stop_reasons={"infra_error": action}, drop_uniform=False)
    assert [t.trajectory_id for t in kept.trajectories] == ["t0", "t4"]
    assert counts["infra"] == 3


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_rollout_without_a_score_is_excluded_not_zero(value: float | None) -> None:
    kept, counts = filter_group(make([(SUBMITTED, 1.0), (SUBMITTED, value)]), stop_reasons={}, drop_uniform=False)
    assert len(kept.trajectories) == 1
    assert (counts["unscored"], counts["singleton"]) == (1, 1)
    assert kept.dropped is None
    assert compute_advantages(kept, "leave_one_out") == [0.0]


@pytest.mark.parametrize(
    ("rewards", "name"),
    [((0.0, 0.0), "solve_none"), ((-1.0, 0.0), "solve_none"), ((1.0, 1.0), "solve_all"), ((1.0, 0.0), "solve_partial")],
)
def test_groups_are_counted_by_what_was_solved(rewards: tuple[float, ...], name: str) -> None:
    _, counts = filter_group(make([(SUBMITTED, r) for r in rewards]), stop_reasons={}, drop_uniform=False)
    assert {k: v for k, v in counts.items() if k.startswith("solve") and v} == {name: 1}


def test_uniform_groups_leave_only_on_request() -> None:
    uniform = make([(SUBMITTED, 0.0)] * 3)
    kept, counts = filter_group(uniform, stop_reasons={}, drop_uniform=False)
    assert kept.dropped is None
    assert counts["uniform"] == 1
    assert filter_group(uniform, stop_reasons={}, drop_uniform=True)[0].dropped == "uniform"
    mixed = make([(SUBMITTED, 0.0), (SUBMITTED, 1.0)])
    assert filter_group(mixed, stop_reasons={}, drop_uniform=True)[0].dropped is None


def test_a_group_of_which_nothing_is_left_is_empty() -> None:
    kept, _ = filter_group(make([(INFRA, None)]), stop_reasons={}, drop_uniform=False)
    assert kept.dropped == "empty"
    assert compute_advantages(kept, "leave_one_out") == []


def test_reasons_not_named_are_kept() -> None:
    for reason in StopReason:
        want = "drop" if reason.is_infra else "keep"
        assert stop_action(trajectory(reason, 0.0), {}) == want


def test_an_action_that_slipped_past_the_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algo\.stop_reasons\.timeout='zero' is unknown"):
        stop_action(trajectory(TIMEOUT, 0.0), {"timeout": "zero"})
