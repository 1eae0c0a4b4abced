"""Worked examples; uneven and tiny groups; numbers from the published formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swe_rl.algorithms import compute_advantages, group_normalized, leave_one_out
from swe_rl.errors import ConfigError, InvariantError
from swe_rl.types import Reward, StopReason, Trajectory, TrajectoryGroup


def group(*rewards: float | None) -> TrajectoryGroup:
    trajectories = [
        Trajectory(
            trajectory_id=f"t{i}",
            task_id="task",
            group_id="g",
            rollout_index=i,
            turns=[],
            stop_reason=StopReason.SUBMITTED,
            temperature=1.0,
            reward=None if value is None else Reward(value=value),
        )
        for i, value in enumerate(rewards)
    ]
    return TrajectoryGroup(group_id="g", task_id="task", trajectories=trajectories)


@pytest.mark.parametrize(
    ("rewards", "want"),
    [
        ([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ([1, 0, 0], [1, -1 / 2, -1 / 2]),
        ([1, 1, 0], [0.5, 0.5, -1]),
        ([0.25, 0.75], [-0.5, 0.5]),
        ([1, 1, 1], [0, 0, 0]),
        ([0.1, 0.1, 0.1], [0, 0, 0]),  # exactly zero, no rounding residue
        ([1], [0]),  # a singleton has no baseline
        ([], []),
    ],
)
def test_leave_one_out(rewards: list[float], want: list[float]) -> None:
    got = leave_one_out(rewards)
    assert got == pytest.approx(want)
    if len(set(rewards)) <= 1:
        assert got == [0.0] * len(rewards)


@given(st.integers(2, 16).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size))))
def test_leave_one_out_of_binary_rewards(sizes: tuple[int, int]) -> None:
    """With k of G solved: (G - k) / (G - 1) for a success, -k / (G - 1) for a failure."""
    size, solved = sizes
    got = leave_one_out([1.0] * solved + [0.0] * (size - solved))
    assert got[:solved] == pytest.approx([(size - solved) / (size - 1)] * solved)
    assert got[solved:] == pytest.approx([-solved / (size - 1)] * (size - solved))


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_leave_one_out_is_a_scaled_centring(rewards: list[float]) -> None:
    size = len(rewards)
    scaled = [size / (size - 1) * c for c in group_normalized(rewards, normalize_std=False)]
    assert leave_one_out(rewards) == pytest.approx(scaled, abs=1e-9)


def test_group_normalized_uses_the_sample_standard_deviation() -> None:
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0]
    std = math.sqrt(5 / 4 * 0.4 * 0.6)  # sqrt(G / (G - 1) * p * (1 - p))
    assert group_normalized(rewards, normalize_std=False) == pytest.approx([0.6, 0.6, -0.4, -0.4, -0.4])
    want = [c / (std + 1e-6) for c in (0.6, 0.6, -0.4, -0.4, -0.4)]
    assert group_normalized(rewards, normalize_std=True) == pytest.approx(want, rel=1e-12)
    assert group_normalized([1.0], normalize_std=True) == [0.0]
    assert group_normalized([0.3] * 3, normalize_std=True) == [0.0] * 3


def test_compute_advantages_by_name() -> None:
    rewards = group(1.0, 0.0, 0.0, 0.0)
    assert compute_advantages(rewards, "leave_one_out") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert compute_advantages(rewards, "group_mean") == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert compute_advantages(rewards, "group_std") == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
    with pytest.raises(ConfigError, match=r"algo\.advantage='gae'"):
        compute_advantages(rewards, "gae")


@pytest.mark.parametrize("outage", [None, math.nan, math.inf])
def test_an_unscored_member_is_never_taken_for_zero(outage: float | None) -> None:
    with pytest.raises(InvariantError, match="t1 has no finite reward"):
        compute_advantages(group(1.0, outage), "leave_one_out")
