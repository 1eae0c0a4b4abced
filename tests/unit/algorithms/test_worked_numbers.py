"""The numbers that the papers and codes give, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from episodes import group_of, plain, rewards_group

from swe_rl.algorithms import (
    Scores,
    assign_credit,
    generalized_advantages,
    leave_one_out,
    soft_overlong,
    turn_level,
    turn_states,
)
from swe_rl.algorithms.advantages import group_normalized, whitened
from swe_rl.config import AlgoConfig
from swe_rl.types import StopReason


def advantages(algo: AlgoConfig, *members: object) -> dict[str, list[float]]:
    credits, _ = assign_credit([group_of(*members)], algo)  # type: ignore[arg-type]
    return {credit.trajectory.trajectory_id: credit.advantages for credit in credits}


@pytest.mark.parametrize("size", [2, 3, 8, 10])
def test_leave_one_out_with_k_of_g(size: int) -> None:
    """Success (G - k) / (G - 1), failure -k / (G - 1); 0 where all agree."""
    for k in range(size + 1):
        found = leave_one_out([1.0] * k + [0.0] * (size - k))
        success, failure = (size - k) / (size - 1), -k / (size - 1)
        assert found == pytest.approx([success] * k + [failure] * (size - k) if 0 < k < size else [0.0] * size)


@pytest.mark.parametrize(("action", "failure"), [("mask", -1 / 3), ("drop", -1 / 2)])
def test_mask_against_drop(action: str, failure: float) -> None:
    """Rewards (1, 0, 0, 0 of an over-long one): kept in the group failures get -1/3, dropped -1/2; success gets 1."""
    algo = AlgoConfig(stop_preset="keep_all", stop_reasons={"max_turns": action})
    members = [plain("win", 1.0), plain("a", 0.0), plain("b", 0.0), plain("long", 0.0, stop=StopReason.MAX_TURNS)]
    found = advantages(algo, *members)
    assert found["win"] == pytest.approx([1.0])
    assert found["a"] == found["b"] == pytest.approx([failure])
    assert ("long" in found) == (action == "mask")


@pytest.mark.parametrize(
    ("steps", "penalty"), [(1, 0.0), (10, 0.0), (11, -1 / 30), (25, -0.5), (39, -29 / 30), (40, -1.0), (41, -1.0)]
)
def test_nebius_step_penalty(steps: int, penalty: float) -> None:
    """(L_thr - n) / (T_max - L_thr) with L_thr 10 and T_max 40."""
    assert soft_overlong(steps, start=10, end=40) == pytest.approx(penalty)


def test_a_success_at_t_max_nets_zero_and_a_failure_minus_one() -> None:
    algo = AlgoConfig(
        advantage="group_mean",
        stop_preset="nebius",
        length_penalty="turns",
        length_penalty_start=10,
        length_penalty_end=40,
    )
    found = advantages(algo, plain("win", 1.0, num_turns=40), plain("lose", 0.0, num_turns=40), plain("quick", 1.0))
    worth = {"win": 0.0, "lose": -1.0, "quick": 1.0}
    assert {name: values[0] for name, values in found.items()} == pytest.approx(worth)  # their mean is 0


def test_an_all_fail_group_of_unequal_lengths_has_a_signal() -> None:
    settings = {"advantage": "group_std", "stop_preset": "nebius", "drop_uniform_groups": True}
    members = [plain("a", 0.0, num_turns=12), plain("b", 0.0, num_turns=40)]
    assert advantages(AlgoConfig(**settings), *members) == {}
    penal = AlgoConfig(**settings, length_penalty="turns", length_penalty_start=10, length_penalty_end=40)
    found = advantages(penal, *members)
    assert found["a"][0] == pytest.approx(1 / math.sqrt(2), rel=1e-5)
    assert found["b"][0] == pytest.approx(-1 / math.sqrt(2), rel=1e-5)
    by_reward = replace(penal, uniform_by="reward")  # DAPO: only groups with 0 < number solved < G
    assert advantages(by_reward, *members) == {}
    assert len(advantages(by_reward, members[0], plain("win", 1.0, num_turns=12))) == 2


@pytest.mark.parametrize(
    ("length", "penalty"), [(16_384, 0.0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1.0), (30_000, -1.0)]
)
def test_dapo_overlong(length: int, penalty: float) -> None:
    """L_max 20,480, cache 4,096."""
    assert soft_overlong(length, start=20_480 - 4_096, end=20_480) == pytest.approx(penalty)


def test_the_penalty_before_or_after_standardising() -> None:
    """Rewards (1, 0, 0), the first at the end of the penalty. Before: worth (0.5, 0, 0). After: the advantages of (1,
    0, 0), less 0.5 for the long one."""
    shared = {
        "stop_preset": "keep_all",
        "length_penalty": "turns",
        "length_penalty_end": 4,
        "length_penalty_scale": 0.5,
    }
    members = [plain("long", 1.0, num_turns=4), plain("a", 0.0, num_turns=1), plain("b", 0.0, num_turns=2)]
    before = advantages(AlgoConfig(**shared, advantage="group_std"), *members)
    worth = [0.5, -0.125, -0.25]
    assert [before[n][0] for n in ("long", "a", "b")] == pytest.approx(group_normalized(worth, normalize_std=True))
    after = advantages(AlgoConfig(**shared, advantage="group_std", length_penalty_on="advantage"), *members)
    plain_ones = group_normalized([1.0, 0.0, 0.0], normalize_std=True)
    assert [after[n][0] for n in ("long", "a", "b")] == pytest.approx(
        [plain_ones[0] - 0.5, plain_ones[1] - 0.125, plain_ones[2] - 0.25]
    )


def test_length_in_tokens_counts_what_was_sampled_not_what_tools_printed() -> None:
    algo = AlgoConfig(
        advantage="group_mean",
        length_penalty="tokens",
        length_penalty_start=10,
        length_penalty_end=20,
        stop_preset="keep_all",
    )
    from episodes import episode

    wordy_tool = episode("tool", 1.0, [([1] * 500, [2] * 10)])
    wordy_policy = episode("policy", 1.0, [([1], [2] * 20)])
    assert advantages(algo, wordy_tool, wordy_policy) == {"tool": [0.5], "policy": [-0.5]}


def test_gae_by_hand_on_four_turns() -> None:
    """V = (0.5, 0.4, 0.6, 0.7), reward 1 after the last turn, gamma 0.9, lambda 0.8.

    delta = (0.9*0.4-0.5, 0.9*0.6-0.4, 0.9*0.7-0.6, 1-0.7) = (-0.14, 0.14, 0.03, 0.3);
    A_3 = 0.3, A_2 = 0.03+0.72*0.3 = 0.246, A_1 = 0.14+0.72*0.246 = 0.31712, A_0 = -0.14+0.72*0.31712 = 0.0883264.
    """
    found, targets = generalized_advantages([0, 0, 0, 1.0], [0.5, 0.4, 0.6, 0.7], gamma=0.9, lam=0.8)
    assert found == pytest.approx([0.0883264, 0.31712, 0.246, 0.3])
    assert targets == pytest.approx([0.5883264, 0.71712, 0.846, 1.0])


@pytest.mark.parametrize(("lam", "want"), [(1.0, [0.5, 0.6, 0.4, 0.3]), (0.0, [-0.1, 0.2, 0.1, 0.3])])
def test_gae_at_its_ends(lam: float, want: list[float]) -> None:
    """lambda 1: the return less the value; lambda 0: one temporal difference."""
    found, _ = generalized_advantages([0, 0, 0, 1.0], [0.5, 0.4, 0.6, 0.7], gamma=1.0, lam=lam)
    assert found == pytest.approx(want)


def test_grpo_of_binary_rewards() -> None:
    """Sample std: sqrt(G / (G - 1) p (1 - p)); with p = 1/4 of 4, (1 - p) / std = 1.5 and -p / std = -0.5."""
    found = group_normalized([1.0, 0.0, 0.0, 0.0], normalize_std=True)
    assert found == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_reinforce_pp_whitens_over_tokens_and_shifts_uniform_groups() -> None:
    """Two groups: (1, 0) with 2 and 6 tokens, (1, 1) with 4 tokens each. A = (0.5, -0.5, 0, 0) before whitening."""
    members = [plain("a", 1.0, length=2), plain("b", 0.0, length=6)]
    others = [plain("c", 1.0, length=4, group="h"), plain("d", 1.0, length=4, group="h")]
    algo = AlgoConfig(advantage="reinforce_pp", stop_preset="keep_all")
    credits, _ = assign_credit([group_of(*members), group_of(*others, name="h")], algo)
    mean = (2 * 0.5 - 6 * 0.5) / 16
    variance = (2 * (0.5 - mean) ** 2 + 6 * (-0.5 - mean) ** 2 + 8 * mean**2) / 15
    want = [(a - mean) / math.sqrt(variance + 1e-8) for a in (0.5, -0.5, 0.0, 0.0)]
    assert [credit.advantages[0] for credit in credits] == pytest.approx(want)
    assert credits[2].advantages[0] > 0, "a group without a signal is pushed by the mean of the others"


def test_whitening_counts_trained_tokens_and_comes_before_a_penalty_on_the_advantage() -> None:
    """A = (0.5, -0.5) of 2 and 6 tokens; with a masked one of 9 in the group, its -1/3 has no weight."""
    settings = {"advantage": "reinforce_pp", "stop_preset": "keep_all", "stop_reasons": {"max_turns": "mask"}}
    members = [plain("a", 1.0, length=2), plain("b", 0.0, length=6)]
    masked = plain("c", 0.0, length=9, stop=StopReason.MAX_TURNS)
    centred = whitened([2 / 3, -1 / 3], [2, 6])
    found = advantages(AlgoConfig(**settings), *members, masked)
    assert [found[name][0] for name in "ab"] == pytest.approx(centred)
    penal = AlgoConfig(**settings, length_penalty="turns", length_penalty_end=4, length_penalty_on="advantage")
    found = advantages(penal, *members, masked)
    assert [found[name][0] for name in "ab"] == pytest.approx([value - 0.25 for value in centred])  # of one turn each


@pytest.mark.parametrize(("scale", "want"), [(0.25, [1, -0.125, -0.125]), (0.0, [1, 0, 0]), (2.0, [1, -1, -1])])
def test_negative_advantages_are_scaled_after_the_baseline(scale: float, want: list[float]) -> None:
    """Rewards (1, 0, 0): leave-one-out (1, -1/2, -1/2)."""
    algo = AlgoConfig(negative_scale=scale, stop_preset="keep_all")
    found = advantages(algo, plain("a", 1.0), plain("b", 0.0), plain("c", 0.0))
    assert [found[name][0] for name in "abc"] == pytest.approx(want)


def test_kl_in_the_reward_is_taken_off_before_the_baseline() -> None:
    """Rewards (1, 0), KL sums (2, 0.5) nats, coefficient 0.1: worth (0.8, -0.05), whose mean is 0.375."""
    algo = AlgoConfig(advantage="group_mean", stop_preset="keep_all", kl_coeff=0.1, kl_in="reward")
    scores = {"a": Scores(kl=2.0), "b": Scores(kl=0.5)}
    credits, _ = assign_credit([group_of(plain("a", 1.0), plain("b", 0.0))], algo, scores=scores)
    assert [credit.advantages[0] for credit in credits] == pytest.approx([0.425, -0.425])


def test_whitening_of_nothing_and_of_equals() -> None:
    assert whitened([], []) == []
    assert whitened([2.0, 2.0], [3, 4]) == [0.0, 0.0]
    assert whitened([1.0, 2.0], [1, 0]) == [0.0, 0.0]


def test_turn_level_credit_where_siblings_share_a_state() -> None:
    """Four rollouts; the first two take the same first action, then one wins. Turn 0 is leave-one-out over all, turn 1
    of the two is judged against the other alone; the third is alone in its later state: leave-one-out again."""
    found = turn_level([1.0, 0.0, 0.0, 0.0], [[b"s", b"x"], [b"s", b"x"], [b"s", b"y"], [b"s"]])
    assert found[0] == pytest.approx([1.0, 1.0])
    assert found[1] == pytest.approx([-1 / 3, -1.0])
    assert found[2] == pytest.approx([-1 / 3, -1 / 3])
    assert found[3] == pytest.approx([-1 / 3])


def test_states_are_equal_where_the_token_ids_are() -> None:
    from episodes import episode

    first = turn_states(episode("a", 1.0, [([1, 2], [3]), ([4], [5, 6])]))
    same_then_other = turn_states(episode("b", 0.0, [([1, 2], [3]), ([4], [7])]))
    split_otherwise = turn_states(episode("c", 0.0, [([1], [2, 3]), ([4], [7])]))
    assert first == same_then_other
    assert first[0] != split_otherwise[0]
    assert first[1] == split_otherwise[1], "the same ids, however they came to be"


def test_rewards_group_is_what_it_says() -> None:
    assert [t.reward.value for t in rewards_group(1.0, 0.0).trajectories if t.reward] == [1.0, 0.0]
