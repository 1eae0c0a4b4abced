"""Terms of the agent's doing, the shaped values, and that a potential leaves the best policy what it was."""

from __future__ import annotations

import itertools
import random

import pytest

from swe_rl.config import RewardConfig
from swe_rl.rewards import shape_reward, shaping_rewards, turn_rewards, visible_potentials
from swe_rl.rewards.shaping import num_test_runs
from swe_rl.types import Completion, Reward, StopReason, ToolCall, Trajectory, Turn

HALF = {"resolved": 0.0, "f2p": 0.5, "p2p": 0.8, "tests_run": 12.0, "patch_lines": 7.0, "tamper": 2.0}


def trajectory(*turns: tuple[str, str, str]) -> Trajectory:
    """(tool, command, observation) of each turn."""
    sampled = Completion(
        token_ids=[1], rollout_logprobs=[0.0], finish_reason="stop", policy_version=0, policy_version_max=0
    )
    return Trajectory(
        trajectory_id="t",
        task_id="t",
        group_id="g",
        rollout_index=0,
        turns=[
            Turn(
                context_ids=[0],
                completion=sampled,
                tool_call=ToolCall(name=tool, arguments={"command": command} if command else {}) if tool else None,
                observation=seen,
            )
            for tool, command, seen in turns
        ],
        stop_reason=StopReason.SUBMITTED,
        temperature=1.0,
    )


EPISODE = trajectory(
    ("bash", "ls", "12 passed in review"),
    ("test", "", "2 failed, 2 passed: test_x: got 3"),
    ("", "", "no call"),
    ("bash", "cd pkg && python3 -m pytest -q", "===== 3 passed, 1 failed in 0.1s ====="),
    ("bash", "echo 4 passed", "4 passed"),
    ("test", "", "4 passed"),
    ("submit", "", ""),
)


def test_test_runs_of_the_agent_are_counted() -> None:
    assert num_test_runs(EPISODE) == 3
    for command in ("pytest -x", "python -m unittest", "tox -e py", "./run_tests.sh", "go test ./...", "cargo test"):
        assert num_test_runs(trajectory(("bash", command, ""))) == 1, command
    for command in ("cat latest.py", "ls tests", "python contest.py", "grep pytests ."):
        assert num_test_runs(trajectory(("bash", command, ""))) == 0, command


@pytest.mark.parametrize(
    ("changes", "value", "summands"),
    [
        ({}, 0.0, {}),
        ({"value": "fraction"}, 0.4, {}),
        ({"patch_line_cost": 0.01}, -0.07, {"patch_line_cost": -0.07}),
        ({"tamper_cost": 0.5}, -1.0, {"tamper_cost": -1.0}),
        ({"test_bonus": 0.1}, 0.1, {"test_bonus": 0.1}),
        ({"value": "fraction", "test_bonus": 0.1, "tamper_cost": 0.1}, 0.3, {"test_bonus": 0.1, "tamper_cost": -0.2}),
    ],
)
def test_values(changes: dict, value: float, summands: dict[str, float]) -> None:
    shaped = shape_reward(Reward(value=0.0, terms=HALF), EPISODE, RewardConfig(**changes))
    assert shaped.value == pytest.approx(value)
    assert not shaped.solved
    assert shaped.terms == pytest.approx({**HALF, "agent_tests": 3.0, **summands})


def test_nothing_tested_is_no_fraction_of_everything() -> None:
    empty = Reward(value=0.0, terms={"empty": 1.0, "resolved": 0.0, "f2p": 0.0, "p2p": 1.0, "tests_run": 0.0})
    assert shape_reward(empty, trajectory(), RewardConfig(value="fraction")).value == 0.0
    no_terms = Reward(value=0.0, terms={"env_killed": 1.0})
    assert shape_reward(no_terms, trajectory(), RewardConfig(value="fraction")).value == 0.0


def test_success_is_what_the_tests_say_whatever_the_value() -> None:
    solved = Reward(value=1.0, terms={**HALF, "resolved": 1.0})
    assert shape_reward(solved, EPISODE, RewardConfig(patch_line_cost=1.0)).solved


def test_the_potential_is_what_the_agent_last_saw_of_the_tests() -> None:
    assert visible_potentials(EPISODE) == [0.0, 0.0, 0.5, 0.5, 0.75, 0.75, 1.0]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_what_is_added_from_a_turn_on_is_minus_its_potential(gamma: float) -> None:
    potentials = visible_potentials(EPISODE)
    added = shaping_rewards(potentials, gamma=gamma)
    for turn, before in enumerate(potentials):
        rest = sum(gamma**k * extra for k, extra in enumerate(added[turn:]))
        assert rest == pytest.approx(-before)
    rewards = turn_rewards(EPISODE, 1.0, weight=2.0, gamma=gamma)
    assert [r - 2 * f for r, f in zip(rewards, added, strict=True)] == pytest.approx([0.0] * 6 + [1.0])
    assert turn_rewards(trajectory(), 1.0, weight=2.0, gamma=gamma) == []


# An MDP small enough to look at every policy: states 0..4, the last one ends the episode; two actions.
STATES, END, ACTIONS, GAMMA = range(4), 4, range(2), 0.9


def make_mdp(seed: int):
    rng = random.Random(seed)
    moves = {(s, a): [rng.random() for _ in range(END + 1)] for s in STATES for a in ACTIONS}
    moves = {key: [p / sum(row) for p in row] for key, row in moves.items()}
    rewards = {(s, a, t): rng.uniform(-1, 1) for s in STATES for a in ACTIONS for t in range(END + 1)}
    potential = [rng.uniform(-2, 2) for _ in STATES] + [0.0]
    return moves, rewards, potential


def values(policy: tuple[int, ...], moves: dict, rewards: dict) -> list[float]:
    """Discounted return of a policy from each state, by iterating its own equation."""
    found = [0.0] * (END + 1)
    for _ in range(300):
        found = [
            sum(p * (rewards[s, policy[s], t] + GAMMA * found[t]) for t, p in enumerate(moves[s, policy[s]]))
            for s in STATES
        ] + [0.0]
    return found


@pytest.mark.parametrize("seed", range(6))
def test_a_potential_leaves_the_order_of_all_policies_unchanged(seed: int) -> None:
    moves, rewards, potential = make_mdp(seed)
    shaped = {
        (s, a, t): reward + shaping_rewards([potential[s], potential[t]], gamma=GAMMA)[0]
        for (s, a, t), reward in rewards.items()
    }
    policies = list(itertools.product(ACTIONS, repeat=len(STATES)))
    for start in STATES:
        plain_order = sorted(policies, key=lambda policy: values(policy, moves, rewards)[start])
        shaped_order = sorted(policies, key=lambda policy: values(policy, moves, shaped)[start])
        assert plain_order == shaped_order
    best = max(policies, key=lambda policy: values(policy, moves, rewards)[0])
    differences = [a - b for a, b in zip(values(best, moves, shaped), values(best, moves, rewards), strict=True)]
    assert differences == pytest.approx([-phi for phi in potential], abs=1e-9)


def test_another_bonus_for_the_same_states_does_change_the_best_policy() -> None:
    """Paying the potential itself, and not its difference: some seed shows why this is not done."""
    changed = 0
    for seed in range(6):
        moves, rewards, potential = make_mdp(seed)
        paid = {(s, a, t): reward + potential[t] for (s, a, t), reward in rewards.items()}
        policies = list(itertools.product(ACTIONS, repeat=len(STATES)))
        changed += max(policies, key=lambda p: values(p, moves, rewards)[0]) != max(
            policies, key=lambda p: values(p, moves, paid)[0]
        )
    assert changed > 0
