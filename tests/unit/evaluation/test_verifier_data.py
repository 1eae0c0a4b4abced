"""From attempts to questions: balance, order, what is left out, and what no verifier may judge."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from swe_rl.errors import ConfigError
from swe_rl.evaluation.verifier_data import (
    balanced,
    repository_of,
    tasks_by_id,
    to_sample,
    training_questions,
)
from swe_rl.evaluation.verifier_prompt import THOUGHT_LEFT_OUT
from swe_rl.tasks import load_tasks
from swe_rl.testing import make_task
from tests.unit.evaluation.attempts import FIX, RENDERER, SUBMIT, attempt, reader

TASKS = {name: make_task(name) for name in "abc"}
SOLVED = {"a": [True, True, True, False], "b": [False] * 5, "c": [True, False, False, True, False]}


def questions() -> list:  # type: ignore[type-arg]
    made = reader(form="nano")
    attempts = [attempt(TASKS[n], index=i, solved=s) for n, row in SOLVED.items() for i, s in enumerate(row)]
    return [made.question(t, TASKS[t.task_id]) for t in attempts]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("all", {True: 5, False: 5}),
        ("pairs", {True: 3, False: 3}),  # one pair of a, two of c, none of b
        ("none", {True: 5, False: 9}),
    ],
)
def test_balance(how: str, expected: dict[bool, int]) -> None:
    kept = balanced(questions(), how, seed=1)
    assert Counter(q.solved for q in kept) == expected
    if how == "pairs":
        by_task = Counter((q.task_id, q.solved) for q in kept)
        assert by_task == {("a", True): 1, ("a", False): 1, ("c", True): 2, ("c", False): 2}


def test_neither_the_choice_nor_the_order_depends_on_the_order_of_the_input() -> None:
    given = questions()
    want = [q.trajectory_id for q in training_questions(given, balance="all", seed=1)[0]]
    for seed in range(3):
        shuffled = random.Random(seed).sample(given, len(given))
        assert [q.trajectory_id for q in training_questions(shuffled, balance="all", seed=1)[0]] == want
    assert [q.trajectory_id for q in training_questions(given, balance="all", seed=2)[0]] != want


def test_what_is_not_graded_or_too_long_is_counted_and_left_out() -> None:
    made = reader(form="nano", max_tokens=700)
    task = TASKS["a"]
    long = [("x" * 300 + FIX, "y" * 200), (SUBMIT, "")]
    given = [
        attempt(task, index=0, solved=True),
        attempt(task, index=1, solved=False),
        attempt(task, index=2, solved=None),
        attempt(task, long, index=3, solved=True),
        attempt(task, [("<function=x>" + "y" * 600, "")], index=4, solved=True),
    ]
    found = [made.question(t, task) for t in given]
    assert [q.fits for q in found] == [True, True, True, True, False]
    assert found[3].thoughts_left_out == 1
    assert THOUGHT_LEFT_OUT in RENDERER.text(found[3].prompt_ids)
    assert len(found[3].prompt_ids) <= 700
    _, counts = training_questions(found, balance="none", seed=0)
    assert counts == {
        "verifier/num_seen": 5,
        "verifier/num_leaked": 0,
        "verifier/num_condensed": 1,
        "verifier/num_ungraded": 1,
        "verifier/num_too_long": 1,
        "verifier/num_kept": 3,
        "verifier/num_solved": 2,
    }


def test_nothing_to_learn_from_and_an_attempt_that_is_there_twice_are_refused() -> None:
    given = [q for q in questions() if q.task_id == "b"]
    with pytest.raises(ConfigError, match="nothing is left to learn from"):
        training_questions(given, balance="all", seed=0)
    with pytest.raises(ConfigError, match="there twice"):
        training_questions([*given, given[0]], balance="none", seed=0)


def test_only_the_answer_and_the_end_of_the_turn_train() -> None:
    question = questions()[0]
    sample = to_sample(question, RENDERER)
    trained = [i for i, m in zip(sample.input_ids, sample.loss_mask, strict=True) if m]
    assert RENDERER.text(trained) == "<judgement>YES</judgement>"
    assert trained[-1] == RENDERER.end_id
    assert sample.input_ids[: len(question.prompt_ids)] == question.prompt_ids
    assert not any(sample.loss_mask[: len(question.prompt_ids)])


def test_repositories_of_minirepo_are_what_its_tasks_share() -> None:
    train = {repository_of(task) for task in load_tasks("minirepo", split="train", num_tasks=80, seed=5)}
    held = {repository_of(task) for task in load_tasks("minirepo", split="heldout", num_tasks=40, seed=5)}
    assert len(train) > 20
    assert not train & held
    assert repository_of(make_task()) == "calc"


def test_tasks_are_found_by_the_ids_of_their_rollouts() -> None:
    wanted = [*load_tasks("minirepo", split="heldout", num_tasks=4, seed=9)[1:]]
    wanted += load_tasks("minirepo", split="hard", num_tasks=1, seed=2)
    found = tasks_by_id("minirepo", [task.task_id for task in wanted])
    assert found == {task.task_id: task for task in wanted}
    with pytest.raises(ConfigError, match="has no task elsewhere-1"):
        tasks_by_id("minirepo", ["elsewhere-1"])
