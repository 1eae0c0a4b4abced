"""Planted answers are found wherever the agent may have been shown them; its own work is its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swe_rl.errors import ConfigError
from swe_rl.evaluation.verifier_data import training_questions
from swe_rl.evaluation.verifier_leaks import LeakError, leaks
from swe_rl.tasks import load_tasks
from swe_rl.tasks.minirepo.demonstrator import Demonstrator
from swe_rl.testing import make_task
from swe_rl.types import Task
from tests.unit.evaluation.attempts import FIX, LOOK, PATCH, SUBMIT, attempt, reader

TASK = make_task()
WRONG = b"diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n"
WRONG += b"-    return a - b\n+    return a * b\n"
REPAIRED = "def add(a, b):\n    return a + b\n"


def found(*turns: tuple[str, str], task: Task = TASK, patch: bytes = WRONG) -> list[str]:
    question = reader(form="nano")
    return list(leaks(question.log(attempt(task, turns, patch=patch, solved=False), task), task))


def test_an_honest_attempt_gives_nothing_away() -> None:
    assert found((LOOK, "def add(a, b):\n    return a - b"), (FIX, ""), (SUBMIT, "")) == []
    test = "assert add(0, 0) == 0"  # of a test that everybody can see
    assert found((LOOK, f"1 failed: test_zero: {test}: got 1"), (SUBMIT, "")) == []


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ("tests/test_hidden.py::test_add FAILED", "hidden test 'test_add'"),
        ("collected 2 items\ntests/test_hidden.py ..", "hidden test 'tests/test_hidden.py'"),
        ("E   assert add(1, 2) == 3", "a line of the hidden tests"),
        (make_task().gold_patch.decode(), "a hunk of the gold patch"),
        (f"here it is:\n{REPAIRED}", "the repaired program"),
    ],
)
def test_what_the_agent_was_shown_is_searched(planted: str, words: str) -> None:
    leaked = found((LOOK, planted), (SUBMIT, ""))
    assert leaked
    assert any(words in item and "the output of step 1" in item for item in leaked)
    opening = replace(TASK, problem_statement=f"{TASK.problem_statement}\n{planted}")
    assert opening != TASK  # a hidden line in the issue is known to everybody; all else is not
    if "a line of" not in words:
        assert any("the issue" in item for item in found((SUBMIT, ""), task=opening))


def test_what_the_agent_wrote_before_is_its_own() -> None:
    edit = f"<function=edit_function><parameter=body>{REPAIRED}</parameter></function>"
    assert found((edit, "ok"), (LOOK, REPAIRED), (SUBMIT, ""), patch=PATCH) == []
    assert found((LOOK, REPAIRED), (edit, "ok"), patch=PATCH) != []  # shown first, then written
    own_test = "<function=bash><parameter=command>python3 -c 'assert add(1, 2) == 3'</parameter></function>"
    assert found((own_test, "E   assert add(1, 2) == 3"), (SUBMIT, "")) == []


def test_an_edit_by_command_explains_the_sight_of_what_the_final_patch_has() -> None:
    assert found((FIX, ""), (LOOK, REPAIRED), (SUBMIT, ""), patch=PATCH) == []
    assert found((FIX, ""), (LOOK, REPAIRED), (SUBMIT, ""), patch=WRONG) != []  # nothing it did explains it
    assert found((LOOK, REPAIRED), (FIX, ""), (SUBMIT, ""), patch=PATCH) != []


def test_a_hunk_of_the_gold_patch_is_written_by_nobody() -> None:
    hunk = make_task().gold_patch.decode().partition("@@")
    text = f"<function=bash><parameter=command>git apply - <<E\n{hunk[1]}{hunk[2]}E</parameter></function>"
    assert any("holds a hunk" in item for item in found((text, ""), patch=PATCH))


def test_of_an_image_the_names_that_its_hidden_tests_add_are_searched() -> None:
    test_patch = b"--- a/t/test_x.py\n+++ b/t/test_x.py\n@@ -1,1 +1,3 @@\n import m\n"
    test_patch += b"+def test_new_case():\n+    assert m.answer(7) == 49\n"
    ids = ("t/test_x.py::test_new_case", "t/test_x.py::test_old_case")
    task = replace(TASK, tree={}, hidden_files={}, image="i", fail_to_pass=ids, pass_to_pass=(), test_patch=test_patch)
    assert found((LOOK, "test_old_case passed"), task=task) == []
    assert found((LOOK, "test_new_case passed"), task=task) != []
    assert found((LOOK, "assert m.answer(7) == 49"), task=task) != []


def test_the_data_builder_refuses_and_says_which_and_where() -> None:
    made = reader(form="nano")
    clean = [attempt(TASK, index=i, solved=bool(i)) for i in range(2)]
    planted = attempt(TASK, [(LOOK, "tests/test_hidden.py::test_add PASSED"), (SUBMIT, "")], index=7)
    with pytest.raises(LeakError) as err:
        training_questions([made.question(t, TASK) for t in (*clean, planted)], balance="all", seed=0)
    assert isinstance(err.value, ConfigError)
    assert "phase/0/add-0/7" in str(err.value)
    assert "output of step 1" in str(err.value)
    kept, _ = training_questions([made.question(t, TASK) for t in clean], balance="all", seed=0)
    assert len(kept) == 2
    # among thousands that were just sampled one may come upon a line by chance: left out and counted, up to a share
    questions = [made.question(t, TASK) for t in (*clean, planted)]
    kept, counts = training_questions(questions, balance="all", seed=0, chance_leaks=0.34)
    assert [question.leak for question in kept] == ["", ""]
    assert (counts["verifier/num_leaked"], counts["verifier/num_seen"]) == (1, 3)
    with pytest.raises(LeakError):
        training_questions(questions, balance="all", seed=0, chance_leaks=0.33)


def test_no_demonstration_of_minirepo_is_suspected() -> None:
    for split in ("train", "heldout", "hard"):
        for task in load_tasks("minirepo", split=split, num_tasks=6, seed=3):
            for p_right in (1.0, 0.0):
                player = Demonstrator(task, 0, p_right=p_right)
                turns = []
                while (call := player.next_call(None, False)).name != "submit":
                    arguments = "".join(f"<parameter={k}>{v}</parameter>" for k, v in call.arguments.items())
                    shown = (
                        task.tree[call.arguments["command"][4:]].decode()
                        if call.arguments.get("command", "").startswith("cat ")
                        else "ok"
                    )
                    turns.append((f"<function={call.name}>{arguments}</function>", shown))
                if p_right == 1.0:  # and then it looks at what it has made of it
                    turns.append((LOOK, task.meta["clean"]))
                assert found(*turns, task=task, patch=task.gold_patch if p_right else b"") == [], task.task_id
