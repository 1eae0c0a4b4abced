"""Only ids that the engine returned train; everything else about a trajectory is context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swe_rl.batching import to_samples
from swe_rl.errors import InvariantError
from swe_rl.types import Completion, StopReason, Trajectory, Turn


def turn(context: Sequence[int], sampled: Sequence[int], *, version: int = 3, bad_format: bool = False) -> Turn:
    completion = Completion(
        token_ids=list(sampled),
        rollout_logprobs=[-0.1 * (i + 1) for i in range(len(sampled))],
        finish_reason="stop",
        policy_version=version,
        policy_version_max=version + 1,
    )
    return Turn(
        context_ids=list(context), completion=completion, tool_call=None, observation="", format_error=bad_format
    )


def trajectory(*turns: Turn, temperature: float = 0.8) -> Trajectory:
    return Trajectory(
        trajectory_id="t",
        task_id="task",
        group_id="g",
        rollout_index=0,
        turns=list(turns),
        stop_reason=StopReason.SUBMITTED,
        temperature=temperature,
    )


THREE = trajectory(
    turn([1, 2, 3], [10, 11]), turn([4], [12], bad_format=True, version=2), turn([5, 6], []), turn([7], [13, 14])
)


def test_ids_mask_and_logprobs_are_aligned() -> None:
    (sample,) = to_samples(THREE, 0.5)
    assert sample.input_ids == [1, 2, 3, 10, 11, 4, 12, 5, 6, 7, 13, 14] == THREE.token_ids
    assert [i for i, m in zip(sample.input_ids, sample.loss_mask, strict=True) if m] == [10, 11, 12, 13, 14]
    assert sample.rollout_logprobs == pytest.approx([0, 0, 0, -0.1, -0.2, 0, -0.1, 0, 0, 0, -0.1, -0.2])
    assert sample.turn_ids == [-1, -1, -1, 0, 0, -1, 1, -1, -1, -1, 3, 3]
    assert sample.advantages == [0.5 if m else 0.0 for m in sample.loss_mask]
    assert (sample.policy_version, sample.temperature, sample.token_weights) == (2, 0.8, [])


def test_a_turn_that_leaves_context_out_begins_a_new_sample() -> None:
    """The thought [10, 11] of turn 0 is gone in turn 1, the observation [4] in turn 3; the rest only grew."""
    branched = trajectory(
        turn([1, 2], [10, 11, 12], version=5),
        replace(turn([12, 4], [13, 14]), kept_context=2),
        turn([5], [15], version=2),
        replace(turn([6, 13], [16], version=9), kept_context=3),
    )
    first, second, third = to_samples(branched, [1.0, 2.0, 3.0, 4.0])
    assert first.input_ids == [1, 2, 10, 11, 12]
    assert second.input_ids == [1, 2, 12, 4, 13, 14, 5, 15]
    assert third.input_ids == [1, 2, 12, 6, 13, 16]
    assert second.loss_mask == [False] * 4 + [True, True, False, True]
    assert second.turn_ids == [-1, -1, -1, -1, 1, 1, -1, 2]
    assert second.advantages == [0, 0, 0, 0, 2, 2, 0, 3]
    assert third.rollout_logprobs == pytest.approx([0, 0, 0, 0, 0, -0.1])
    assert [sample.policy_version for sample in (first, second, third)] == [5, 2, 9]
    events = [e for s in (first, second, third) for e, m in zip(s.turn_ids, s.loss_mask, strict=True) if m]
    assert events == [0, 0, 0, 1, 1, 2, 3], "every sampled token trains once"
    for kept in (-1, 6):
        with pytest.raises(InvariantError, match=f"turn 1 keeps {kept} of 5 context ids"):
            to_samples(trajectory(branched.turns[0], replace(branched.turns[1], kept_context=kept)), 1.0)


def test_one_advantage_per_turn() -> None:
    (sample,) = to_samples(THREE, [1.0, -2.0, 7.0, 3.0])
    assert [a for a, m in zip(sample.advantages, sample.loss_mask, strict=True) if m] == [1, 1, -2, 3, 3]
    with pytest.raises(InvariantError, match="3 advantages for 4 turns"):
        to_samples(THREE, [1.0, 2.0, 3.0])


def test_masking_of_format_errors_and_of_everything() -> None:
    (sample,) = to_samples(THREE, 1.0, mask_format_errors=True)
    assert [i for i, m in zip(sample.input_ids, sample.loss_mask, strict=True) if m] == [10, 11, 13, 14]
    (sample,) = to_samples(THREE, math.nan, trained=False)
    assert not any(sample.loss_mask)
    assert sample.advantages == sample.rollout_logprobs == [0.0] * 12
    assert sample.turn_ids[3] == 0, "the sampling event stays known"


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_non_finite_rollout_logprob_leaves_the_mask(value: float) -> None:
    bad = turn([1], [10, 11, 12])
    bad = replace(bad, completion=replace(bad.completion, rollout_logprobs=[-1.0, value, -2.0]))
    (sample,) = to_samples(trajectory(bad), 2.0)
    assert sample.loss_mask == [False, True, False, True]
    assert sample.rollout_logprobs == [0.0, -1.0, 0.0, -2.0]
    assert sample.advantages == [0.0, 2.0, 0.0, 2.0]


def test_greedy_rollouts_are_scored_at_temperature_one() -> None:
    (sample,) = to_samples(trajectory(turn([1], [2]), temperature=0.0), 1.0)
    assert sample.temperature == 1.0


def test_a_trajectory_without_ids_gives_no_sample() -> None:
    assert to_samples(trajectory(), 1.0) == []


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (
            replace(turn([1], [2, 3]), completion=replace(turn([1], [2, 3]).completion, rollout_logprobs=[-1.0])),
            "2 sampled ids, 1 logprobs",
        ),
        (turn([], [2, 3]), "nothing predicts it"),
    ],
)
def test_broken_trajectories_stop_the_run(broken: Turn, words: str) -> None:
    with pytest.raises(InvariantError, match=words):
        to_samples(trajectory(broken), 1.0)


def test_a_non_finite_advantage_stops_the_run() -> None:
    with pytest.raises(InvariantError, match="advantage nan of turn 0"):
        to_samples(THREE, math.nan)
