from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import tasks_support as helpers

from swe_rl.errors import ConfigError, InvariantError
from swe_rl.tasks import load_tasks
from swe_rl.tasks.minirepo.demonstrator import Demonstrator
from swe_rl.tasks.minirepo.generate import HIDDEN_PATH
from swe_rl.types import Task, ToolCall


def play(task: Task, demonstrator: Demonstrator) -> tuple[list[ToolCall], dict[str, bytes]]:
    """Plays the calls on the task's files; returns them and the final tree."""
    tree, current = dict(task.tree), {bug["function"]: bug["buggy"] for bug in task.meta["bugs"]}
    (visible,) = [path for path in tree if path.startswith("tests/")]
    calls: list[ToolCall] = []
    passed: bool | None = None
    while not calls or calls[-1].name != "submit":
        call = demonstrator.next_call("" if calls else None, passed)
        calls.append(call)
        passed = None
        if call.name == "edit_function":
            path, name, body = call.arguments["path"], call.arguments["name"], call.arguments["body"]
            assert current[name].encode() in tree[path]
            tree[path] = tree[path].replace(current[name].encode(), body.encode())
            current[name] = body
        elif call.name == "test":
            passed = all(helpers.outcomes(tree, visible).values())
    return calls, tree


def solved(task: Task, tree: dict[str, bytes]) -> bool:
    return all(helpers.outcomes(tree | dict(task.hidden_files), HIDDEN_PATH).values())


@pytest.mark.parametrize("split", ["train", "heldout", "hard"])
def test_oracle_solves_every_task_in_few_calls(split):
    for task in load_tasks("minirepo", split=split, num_tasks=60, seed=6):
        calls, tree = play(task, Demonstrator.oracle(task))
        assert solved(task, tree)
        assert len(calls) <= 8
        assert [call.name for call in calls[-2:]] == ["test", "submit"]
        assert calls[0].arguments["command"] == f'grep -rn "def {task.meta["function"]}" *'
        assert calls[1].arguments["command"] == f"cat {task.meta['path']}"


def test_success_follows_the_share_of_right_edits():
    tasks = load_tasks("minirepo", split="train", num_tasks=300, seed=8)
    rates = []
    for p_right in (0.0, 0.15, 0.6):
        results = [solved(task, play(task, Demonstrator(task, 0, p_right=p_right))[1]) for task in tasks]
        rates.append(sum(results) / len(results))
    assert rates[0] < 0.1  # a mutant of the clean function may be equivalent to it
    assert 0.12 < rates[1] < 0.35  # 0.15 at the first attempt, more by the second ones
    assert 0.55 < rates[2] < 0.85


def test_gives_up_after_a_failed_test_with_the_given_probability():
    tasks = load_tasks("minirepo", split="train", num_tasks=300, seed=1)
    attempts = Counter()
    for task in tasks:
        demonstrator = Demonstrator(task, 3, p_right=0.0, p_give_up=0.7)
        calls = [demonstrator.next_call(None, None) for _ in range(3)]
        assert [call.name for call in calls] == ["bash", "bash", "edit_function"]
        assert demonstrator.next_call("", None).name == "test"
        attempts[demonstrator.next_call("1 failed", False).name] += 1
    assert set(attempts) == {"submit", "edit_function"}
    assert 0.62 < attempts["submit"] / 300 < 0.78


def test_submits_at_once_when_the_visible_tests_pass():
    for task in load_tasks("minirepo", split="train", num_tasks=20, seed=1):
        demonstrator = Demonstrator(task, 0, p_right=0.0, p_give_up=0.0)
        for _ in range(4):
            call = demonstrator.next_call("", None)
        assert call.name == "test"
        assert demonstrator.next_call("1 passed", True) == ToolCall(name="submit", arguments={})
        with pytest.raises(InvariantError):
            demonstrator.next_call("", None)


def test_is_a_function_of_task_seed_and_observations():
    task = load_tasks("minirepo", split="hard", num_tasks=1, seed=0)[0]
    assert play(task, Demonstrator(task, 5))[0] == play(task, Demonstrator(task, 5))[0]
    bodies = {call.arguments["body"] for seed in range(12) for call in play(task, Demonstrator(task, seed))[0][2:3]}
    assert len(bodies) > 3


def test_refuses_a_task_of_another_source():
    task = replace(load_tasks("minirepo", split="train", num_tasks=1, seed=0)[0], meta={})
    with pytest.raises(ConfigError, match="minirepo"):
        Demonstrator(task, 0)
