"""Outcomes read exactly, duplicates by behaviour, toxicity and distinguishability by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swe_rl.errors import ConfigError
from swe_rl.evaluation.execution_outcomes import OTHER, REPRODUCED, RESOLVED, outcome_of, printed_outcomes
from swe_rl.evaluation.execution_tests import (
    WrittenTest,
    examined,
    functions_in_file,
    quality_of,
    read_tests,
    without_duplicates,
    write_tests,
)
from swe_rl.tasks.test_runner import Verdict
from swe_rl.testing import make_task

SOURCE = b"""import os


def helper():
    pass


def test_a():
    assert 1


class X:
    def test_no(self): ...


def test_b():
    assert 0
"""


@pytest.mark.parametrize(
    ("output", "outcomes"),
    [
        ("Issue resolved\n", [RESOLVED]),
        ("Issue unresolved\n", []),
        ("the Issue resolved\n", []),
        ("Issue resolved? no\n", []),
        ("  issue resolved.  \nIssue reproduced!\nOther issues\n", [RESOLVED, REPRODUCED, OTHER]),
        ("Issue reproduced\r\nIssue resolved", [REPRODUCED, RESOLVED]),
        ("unresolved resolved\nresolved\nIssue\nresolved", []),
        ("", []),
    ],
)
def test_printed_outcomes_are_whole_lines(output: str, outcomes: list[str]) -> None:
    assert printed_outcomes(output) == outcomes


@pytest.mark.parametrize(
    ("status", "outcome"),
    [("passed", RESOLVED), ("failed", REPRODUCED), ("error", OTHER), ("missing", OTHER), ("forged", OTHER)],
)
def test_outcomes_of_plain_functions(status: str, outcome: str) -> None:
    assert outcome_of(Verdict(status)) == outcome
    assert outcome_of(None) == OTHER


def written(name: str, *, state: str = "valid", task: str = "t") -> WrittenTest:
    return WrittenTest(test_id=name, task_id=task, path="test_issue.py", function=name, state=state)


def test_the_tests_of_a_file() -> None:
    task = make_task()
    found = functions_in_file(task, SOURCE, path="d/test_issue.py", name="agent/0")
    assert [test.test_id for test in found] == ["agent/0::test_a", "agent/0::test_b"]
    assert found[0].node_id == "d/test_issue.py::test_a"
    (broken,) = functions_in_file(task, b"def test_a(:\n", path="test_issue.py", name="agent/0")
    assert broken.state == "syntax"
    assert functions_in_file(task, b"x = 1\n", path="test_issue.py", name="agent/0") == []
    (script,) = functions_in_file(replace(task, test_runner="script"), b"print('x')\n", path="test_issue.py", name="a")
    assert (script.function, script.valid) == ("", True)


def test_only_what_reproduces_the_issue_on_the_unpatched_program_is_valid() -> None:
    tests = [written("a"), written("b"), written("c"), written("d"), written("e", state="syntax")]
    found = examined(tests, {"a": REPRODUCED, "b": RESOLVED, "c": OTHER})
    assert [test.state for test in found] == ["valid", "resolved_before", "other_before", "other_before", "syntax"]


def test_of_tests_that_behave_alike_the_first_counts() -> None:
    tests = [written("d"), written("a"), written("b"), written("c"), written("x", state="resolved_before")]
    outcomes = {
        "one": {"a": RESOLVED, "b": REPRODUCED, "c": RESOLVED, "d": RESOLVED},
        "two": {"a": REPRODUCED, "b": REPRODUCED, "c": REPRODUCED, "d": OTHER},
    }
    want = {"d": "valid", "a": "valid", "b": "valid", "c": "duplicate", "x": "resolved_before"}
    assert {test.test_id: test.state for test in without_duplicates(tests, outcomes)} == want
    assert {t.test_id: t.state for t in without_duplicates(tests[::-1], outcomes)} == want
    assert [t.test_id for t in without_duplicates(tests, {}) if t.valid] == ["a"]  # nothing tells them apart


def test_quality_by_hand() -> None:
    tests = [written(name) for name in ("good", "toxic", "useless", "half")] + [written("bad", state="no_test")]
    rows = {  # candidate: solved, and whether it passes good, toxic, useless, half
        "r1": (True, "1010"),
        "r2": (True, "1001"),
        "w1": (False, "0110"),
        "w2": (False, "0000"),
    }
    outcomes = {
        name: {t.test_id: RESOLVED if bit == "1" else REPRODUCED for t, bit in zip(tests, bits, strict=False)}
        for name, (_, bits) in rows.items()
    }
    found = quality_of(tests, outcomes, {name: solved for name, (solved, _) in rows.items()})
    assert found.states == {"no_test": 1, "valid": 4}
    assert (found.judged, found.toxic, found.distinguishing) == (4, 1, 2)
    only_wrong = quality_of(tests, outcomes, {"w1": False, "w2": False})
    assert only_wrong.judged == 0


def test_a_file_of_tests_comes_back(tmp_path: Path) -> None:
    tests = [replace(written("a"), source=b"\xff\ndef test_a(): ...\n"), written("b", state="empty")]
    write_tests(tmp_path / "tests.jsonl", tests)
    assert read_tests(tmp_path) == read_tests(tmp_path / "tests.jsonl") == tests
    (tmp_path / "tests.jsonl").write_text('{"test_id": "a"}\n')
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="holds no written tests"):
            read_tests(path)
