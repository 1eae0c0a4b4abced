"""What a verifier reads: blocks in their order, files that were there, and what is left out when it is too long."""

from __future__ import annotations

import pytest

from swe_rl.agents.formats import FORMATS
from swe_rl.evaluation.verifier_prompt import (
    FORMS,
    OUTPUT_LEFT_OUT,
    THOUGHT_LEFT_OUT,
    Log,
    Step,
    answer,
    condense,
    known_files,
    make_log,
    messages,
    write_log,
)
from swe_rl.testing import make_task
from tests.unit.evaluation.attempts import FIX, PATCH, RENDERER, SUBMIT, attempt

TASK = make_task()
OPENING = [{"role": "system", "content": "You repair."}, {"role": "user", "content": "add(1, 2) gave -1"}]


def log_of(*turns: tuple[str, str], patch: bytes = PATCH) -> Log:
    return make_log(
        attempt(TASK, turns, patch=patch),
        TASK,
        opening=OPENING,
        decode=RENDERER.text,
        action_format=FORMATS["xml"],
    )


def test_blocks_come_in_the_order_of_the_published_form() -> None:
    log = log_of((f"I think so.{FIX}", "done"), (SUBMIT, ""))
    assert log.steps[0] == Step(thought="I think so.", action=FIX, observation="done")
    text = write_log(log, FORMS["r2e"])
    marks = ["[SYSTEM]\nYou repair.", "[USER]\nadd(1, 2) gave -1", "[STEP] 1\n[ASSISTANT]\nI think so.<function=bash>"]
    marks += ["[USER]\ndone", "[STEP] 2\n[ASSISTANT]\n<function=submit>", "[PATCH]\ndiff --git a/calc.py"]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert text.endswith("<judgement>NO</judgement>.")
    system, user = messages(log, FORMS["r2e"])
    assert (system["role"], user["role"]) == ("system", "user")
    assert "YES" in system["content"]
    assert messages(log, FORMS["r2e"], instruction="Judge.")[0]["content"] == "Judge."


def test_the_short_form_has_neither_instruction_nor_question() -> None:
    (only,) = messages(log_of((SUBMIT, "")), FORMS["nano"])
    assert only["content"].startswith("system\nYou repair.\nuser\nadd(1, 2)")
    assert "[" not in only["content"].partition("patch\n")[0]


def test_text_that_is_no_call_is_kept_as_it_was_said() -> None:
    (step,) = log_of(("I give up", "format error")).steps
    assert step == Step(thought="", action="I give up", observation="format error")


def test_the_patch_shows_files_that_were_there_before() -> None:
    new = b"diff --git a/x.py b/x.py\nnew file mode 100644\n--- /dev/null\n+++ b/x.py\n@@ -0,0 +1 @@\n+1\n"
    other = b"diff --git a/o.py b/o.py\n--- a/o.py\n+++ b/o.py\n@@ -1 +1 @@\n-1\n+2\n"
    assert known_files(PATCH + new + other, TASK) == PATCH.decode()
    assert known_files(b"no diff at all", TASK) == ""
    assert known_files(b"", TASK) == ""


def test_answers() -> None:
    assert answer(True) == "<judgement>YES</judgement>"
    assert answer(False) == "<judgement>NO</judgement>"


def words(text: str) -> int:
    return len(text.split())


def long_log(*steps: tuple[int, int]) -> Log:
    """(words of the thought, words of the output) per step; every action has one word."""
    made = [Step(thought="t " * thought, action="act ", observation="o " * output) for thought, output in steps]
    return Log(system="", issue="issue", steps=tuple(made), patch="")


@pytest.mark.parametrize(
    ("budget", "thoughts", "outputs", "left"),
    [
        (179, 0, 0, [50, 30, 40]),
        (178, 1, 0, [7, 30, 40]),  # the longest first
        (135, 2, 0, [7, 30, 7]),
        (102, 3, 0, [7, 7, 7]),
        (79, 3, 1, [7, 7, 7]),  # then the longest output
        (56, 3, 2, [7, 7, 7]),
        (20, 3, 2, [7, 7, 7]),  # the third output is shorter than the note would be
    ],
)
def test_the_longest_thoughts_go_first_then_outputs(budget: int, thoughts: int, outputs: int, left: list[int]) -> None:
    log = long_log((50, 5), (30, 30), (40, 20))
    total = sum(words(s.thought + s.action + s.observation) for s in log.steps) + 1
    found = condense(log, budget=budget, total=total, count=words)
    assert (found.thoughts, found.outputs) == (thoughts, outputs)
    assert [words(step.thought) for step in found.log.steps] == left
    now = sum(words(f"{s.thought} {s.action}{s.observation}") for s in found.log.steps) + 1
    assert found.fits == (now <= budget)
    assert all(step.action == "act " for step in found.log.steps)
    for step in found.log.steps:
        assert step.thought in (THOUGHT_LEFT_OUT, "t " * 50, "t " * 30, "t " * 40)
        assert step.observation in (OUTPUT_LEFT_OUT, "o " * 5, "o " * 30, "o " * 20)
