"""Bugs of other systems in advantages and grouping, each with its formula beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import pytest
import torch
from immunity import immune

from swe_rl.algorithms import assign_credit, group_normalized, turn_level, whitened
from swe_rl.batching import to_samples
from swe_rl.config import AlgoConfig
from swe_rl.types import Completion, Reward, StopReason, Trajectory, TrajectoryGroup, Turn


def rollout(
    name: str, reward: float | None, *, group: str, task: str = "task", tokens: Sequence[int] = (2, 3), turns: int = 1
) -> Trajectory:
    completion = Completion(
        token_ids=list(tokens),
        rollout_logprobs=[-1.0] * len(tokens),
        finish_reason="stop",
        policy_version=0,
        policy_version_max=0,
    )
    turn = Turn(context_ids=[1], completion=completion, tool_call=None, observation="")
    return Trajectory(
        trajectory_id=name,
        task_id=task,
        group_id=group,
        rollout_index=0,
        turns=[turn] * turns,
        stop_reason=StopReason.SUBMITTED if reward is not None else StopReason.INFRA_ERROR,
        temperature=1.0,
        reward=None if reward is None else Reward(value=reward),
    )


def grouped(rollouts: Sequence[Trajectory]) -> list[TrajectoryGroup]:
    names = dict.fromkeys(t.group_id for t in rollouts)
    return [
        TrajectoryGroup(group_id=n, task_id=n, trajectories=[t for t in rollouts if t.group_id == n]) for n in names
    ]


Credit = Callable[[Sequence[Trajectory]], dict[str, float]]


def ours(rollouts: Sequence[Trajectory]) -> dict[str, float]:
    credits, _ = assign_credit(grouped(rollouts), AlgoConfig(advantage="group_mean"))
    return {c.trajectory.trajectory_id: c.advantages[0] for c in credits}


def test_groups_by_prompt_text_merge_different_tasks() -> None:
    """NeMo-RL 2176: the key of a group was rebuilt from its messages; equal prompts of different tasks were one
    group."""

    def by_prompt(rollouts: Sequence[Trajectory]) -> dict[str, float]:
        key = {t.trajectory_id: tuple(t.turns[0].context_ids) for t in rollouts}
        found = {}
        for t in rollouts:
            mates = [o.reward.value for o in rollouts if key[o.trajectory_id] == key[t.trajectory_id] and o.reward]
            assert t.reward is not None
            found[t.trajectory_id] = t.reward.value - statistics.fmean(mates)
        return found

    def check(credit: Credit) -> None:
        found = credit(
            [rollout("a", 1.0, group="x"), rollout("b", 0.0, group="x"), rollout("c", 1.0, group="y", task="u")]
        )
        assert found == pytest.approx({"a": 0.5, "b": -0.5, "c": 0.0})

    immune(check, ours=ours, buggy=by_prompt)


def test_advantages_looked_up_by_task_and_step_collide() -> None:
    """rLLM 511, prime-rl 2366: a dictionary by task and step kept one advantage for all rollouts of a task."""

    def by_task(rollouts: Sequence[Trajectory]) -> dict[str, float]:
        right = ours(rollouts)
        table = {(t.task_id, 0): right[t.trajectory_id] for t in rollouts}
        return {t.trajectory_id: table[t.task_id, 0] for t in rollouts}

    def check(credit: Credit) -> None:
        assert credit([rollout("a", 1.0, group="x"), rollout("b", 0.0, group="x")]) == {"a": 0.5, "b": -0.5}

    immune(check, ours=ours, buggy=by_task)


def test_masked_advantages_of_the_last_turn_copied_to_earlier_ones() -> None:
    """SkyRL 1507: the last turn's masked tensor was copied, so earlier turns trained with advantage 0."""
    trajectory = rollout("a", 1.0, group="x", turns=3)

    def copied(value: float) -> list[float]:
        (sample,) = to_samples(trajectory, value)
        last = [a if t == 2 else 0.0 for a, t in zip(sample.advantages, sample.turn_ids, strict=True)]
        return last

    def own_mask(value: float) -> list[float]:
        (sample,) = to_samples(trajectory, value)
        return sample.advantages

    def check(spread: Callable[[float], list[float]]) -> None:
        assert [a for a in spread(0.5) if a] == [0.5] * 6

    immune(check, ours=own_mask, buggy=copied)


def test_fixed_size_slices_cross_groups_after_a_loss() -> None:
    """AReaL 1454: groups were slices of the configured size; one lost rollout shifted all that follow."""

    def sliced(rollouts: Sequence[Trajectory]) -> dict[str, float]:
        whole = [t for t in rollouts if t.reward is not None]
        found = {}
        for start in range(0, len(whole), 2):
            part = whole[start : start + 2]
            mean = statistics.fmean(t.reward.value for t in part if t.reward)
            found |= {t.trajectory_id: t.reward.value - mean for t in part if t.reward}
        return found

    def check(credit: Credit) -> None:
        batch = [
            *(rollout("a", 1.0, group="x"), rollout("lost", None, group="x")),
            *(rollout("b", 0.0, group="y"), rollout("c", 1.0, group="y")),
        ]
        assert credit(batch) == pytest.approx({"a": 0.0, "b": -0.5, "c": 0.5})

    immune(check, ours=ours, buggy=sliced)


def test_an_outage_counted_as_reward_zero() -> None:
    """NeMo Gym 1351, rLLM 710: a crashed verifier scored 0 and moved the baseline of its group."""

    def zero(rollouts: Sequence[Trajectory]) -> dict[str, float]:
        values = {t.trajectory_id: t.reward.value if t.reward else 0.0 for t in rollouts}
        mean = statistics.fmean(values.values())
        return {name: value - mean for name, value in values.items()}

    def check(credit: Credit) -> None:
        found = credit([rollout("a", 1.0, group="x"), rollout("b", 1.0, group="x"), rollout("lost", None, group="x")])
        assert found == pytest.approx({"a": 0.0, "b": 0.0})

    immune(check, ours=ours, buggy=zero)


def test_float32_std_of_equal_rewards_is_not_zero() -> None:
    """slime 1674: the std of equal rewards came out as rounding noise, and the quotient as a signal."""

    def fp32(rewards: Sequence[float]) -> list[float]:
        values = torch.tensor(rewards, dtype=torch.float32)
        centred = values - values.mean()
        return (centred / (centred.square().sum() / (len(rewards) - 1)).sqrt()).tolist()  # type: ignore[no-any-return]

    def check(normalise: Callable[[Sequence[float]], list[float]]) -> None:
        for size in range(2, 40):
            for reward in (0.1, 0.3, 0.7, 1.1):
                assert normalise([reward] * size) == [0.0] * size

    immune(check, ours=lambda rewards: group_normalized(rewards, normalize_std=True), buggy=fp32)


def test_parts_of_a_batch_whitened_on_their_own() -> None:
    """slime 2235: statistics of part of the ranks; ranks without a response token skipped the collective."""
    Parts = Sequence[tuple[Sequence[float], Sequence[int]]]  # (advantages, trained tokens) of each rank

    def apart(parts: Parts) -> list[float]:
        return [v for values, counts in parts for v in whitened(values, counts)]

    def together(parts: Parts) -> list[float]:
        return whitened([v for values, _ in parts for v in values], [n for _, counts in parts for n in counts])

    def check(whiten: Callable[[Parts], list[float]]) -> None:
        whole = whiten([([1.0, 0.0, 3.0], [2, 5, 1])])
        assert whiten([([1.0, 0.0], [2, 5]), ([3.0], [1]), ([], [])]) == pytest.approx(whole)

    immune(check, ours=together, buggy=apart)


def test_a_rollout_that_forgets_context_trains_its_tokens_once() -> None:
    """prime-rl 2975: each branch was a sample of its own, so what they share trained as often as there are branches."""
    base = rollout("a", 1.0, group="x", turns=2)
    from dataclasses import replace

    shorter = replace(base, turns=[*base.turns, replace(base.turns[0], kept_context=3)])

    def flat(trajectory: Trajectory) -> int:
        return 2 * 2 + 2 * 2  # the first branch, and the second with the turn it shares

    def once(trajectory: Trajectory) -> int:
        return sum(sum(s.loss_mask) for s in to_samples(trajectory, 1.0))

    def check(trained: Callable[[Trajectory], int]) -> None:
        assert trained(shorter) == shorter.num_sampled_tokens == 6

    immune(check, ours=once, buggy=flat)


def test_a_baseline_per_turn_index_is_a_hidden_length_penalty() -> None:
    """verl 7244: turns were compared by index with whoever still ran. What the policy gradient should be is known here:
    at turn 1 there is one state, in which action "right" is worth 1 and "wrong" 0, each drawn half of the time.

    Two rollouts; each gets to turn 1 with probability q. The expected pull on "right" there, E[A | right], is 1/2
    whatever q is: the advantage over the mean of the state. Including oneself in a mean over k survivors shrinks it to
    (k - 1) / k of that, so the rarer a turn, the less it learns.
    """
    States = Sequence[Sequence[bytes]]

    def per_index(rewards: Sequence[float], states: States) -> list[list[float]]:
        found = []
        for member, own in enumerate(states):
            turns = []
            for turn in range(len(own)):
                alive = [rewards[j] for j in range(len(states)) if len(states[j]) > turn]
                turns.append(rewards[member] - statistics.fmean(alive))
            found.append(turns)
        return found

    def expected_pull(credit: Callable[[Sequence[float], States], list[list[float]]], q: float) -> float:
        """E[A at turn 1 | rollout 0 is there and right], over what rollout 1 does; stopping early is worth 1/2."""
        pull = (1 - q) * credit([1.0, 0.5], [[b"s", b"t"], [b"s"]])[0][1]
        for other in (0.0, 1.0):
            pull += q / 2 * credit([1.0, other], [[b"s", b"t"], [b"s", b"t"]])[0][1]
        return pull

    def check(credit: Callable[[Sequence[float], States], list[list[float]]]) -> None:
        for q in (0.1, 0.5, 1.0):
            assert expected_pull(credit, q) == pytest.approx(0.5)

    immune(check, ours=turn_level, buggy=per_index)


def test_rollouts_returned_out_of_order_get_the_credit_of_others() -> None:
    """NeMo-RL 1627: rewards in one order, rollouts in another."""

    def zipped(rollouts: Sequence[Trajectory]) -> dict[str, float]:
        values = [t.reward.value for t in rollouts if t.reward]
        mean = statistics.fmean(values)
        finished = rollouts[::-1]  # the order of completion
        return {t.trajectory_id: value - mean for t, value in zip(finished, values, strict=True)}

    def check(credit: Credit) -> None:
        assert credit([rollout("a", 1.0, group="x"), rollout("b", 0.0, group="x")]) == {"a": 0.5, "b": -0.5}

    immune(check, ours=ours, buggy=zipped)
