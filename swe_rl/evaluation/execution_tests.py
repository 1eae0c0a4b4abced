"""Reproduction tests: written by a test agent, examined on the unpatched program, compared by what they do.

A test counts only if it reproduces the issue: on the unpatched program it must run and fail. Of tests that say the same
about the unpatched program and about every candidate, one is kept. What a test is really worth (toxicity,
distinguishability) takes the hidden tests to know: that is for reports, selection never sees it.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from swe_rl.errors import ConfigError
from swe_rl.evaluation.execution_outcomes import OTHER, REPRODUCED, RESOLVED
from swe_rl.training.run_dir import write_atomic
from swe_rl.types import Task

FILE_NAME = "tests.jsonl"
VALID = "valid"
# Why a test does not count: "empty" (nothing was written), "apply_failed", "no_test", "syntax",
# "resolved_before" and "other_before" (its outcome on the unpatched program), "duplicate"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTest:
    """One test function of a file that a test agent left, or a script that prints its outcomes."""

    test_id: str  # trajectory of the agent, then the function
    task_id: str
    path: str = ""  # where it is written, relative to the workspace
    source: bytes = field(default=b"", repr=False)
    function: str = ""  # "" for a script
    state: str = VALID

    @property
    def valid(self) -> bool:
        return self.state == VALID

    @property
    def node_id(self) -> str:
        """As test runners name it."""
        return f"{self.path}::{self.function}"


def functions_in_file(task: Task, source: bytes, *, path: str, name: str) -> list[WrittenTest]:
    """The tests of one file, not yet run; one entry with its reason for a file that is no Python, none without tests.

    A task without a runner of plain functions has scripts: one test each.
    """
    whole = WrittenTest(test_id=f"{name}::{path}", task_id=task.task_id, path=path, source=source)
    if task.test_runner == "script":
        return [whole]
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [replace(whole, state="syntax")]
    names = dict.fromkeys(n.name for n in module.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test"))
    return [replace(whole, test_id=f"{name}::{function}", function=function) for function in names]


def write_tests(path: Path, tests: Iterable[WrittenTest]) -> None:
    """One line of JSON per test."""
    rows = [{**dataclasses.asdict(test), "source": test.source.decode("utf-8", "surrogateescape")} for test in tests]
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def read_tests(path: Path) -> list[WrittenTest]:
    """The tests of `write_tests`, or of the run directory that holds them. ConfigError, one line, for anything else."""
    file = path / FILE_NAME if path.is_dir() else path
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [WrittenTest(**{**row, "source": row["source"].encode("utf-8", "surrogateescape")}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"{file} holds no written tests: `swe-rl verify pipeline` writes them ({err})") from err


def examined(tests: Sequence[WrittenTest], before: Mapping[str, str]) -> list[WrittenTest]:
    """The tests with their states after a run on the unpatched program. before: test id -> outcome there."""
    found = []
    for test in tests:
        outcome = before.get(test.test_id, OTHER)
        state = VALID if outcome == REPRODUCED else f"{outcome}_before"
        found.append(replace(test, state=state) if test.valid else test)
    return found


def without_duplicates(tests: Sequence[WrittenTest], outcomes: Mapping[str, Mapping[str, str]]) -> list[WrittenTest]:
    """Of valid tests that behave alike, the first by id stays valid. outcomes: candidate -> test id -> outcome.

    Alike is the same outcome with every candidate; on the unpatched program valid tests agree anyway.
    """
    kept: dict[tuple[str, ...], str] = {}
    for test in sorted((test for test in tests if test.valid), key=lambda test: test.test_id):
        behaviour = tuple(outcomes[name].get(test.test_id, OTHER) for name in sorted(outcomes))
        kept.setdefault(behaviour, test.test_id)
    first = set(kept.values())
    return [replace(t, state="duplicate") if t.valid and t.test_id not in first else t for t in tests]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of valid tests of tasks that have both right and wrong candidates."""

    states: Mapping[str, int]  # every test that was written, by state
    judged: int  # valid ones of such tasks
    toxic: int  # pass a wrong candidate and fail every right one (R2E-Gym)
    distinguishing: int  # pass a larger share of the right ones than of the wrong ones


def quality_of(
    tests: Iterable[WrittenTest], outcomes: Mapping[str, Mapping[str, str]], solved: Mapping[str, bool]
) -> Quality:
    """outcomes: candidate -> test id -> outcome; solved: candidate -> by the hidden tests. Only for reports."""
    every = list(tests)
    judged = toxic = distinguishing = 0
    for test in every:
        votes = [
            (outcomes[name][test.test_id] == RESOLVED, solved[name]) for name in solved if _ran(outcomes, name, test)
        ]
        right = [vote for vote, good in votes if good]
        wrong = [vote for vote, good in votes if not good]
        if not test.valid or not right or not wrong:
            continue
        judged += 1
        toxic += any(wrong) and not any(right)
        distinguishing += sum(right) / len(right) > sum(wrong) / len(wrong)
    states = dict(sorted(Counter(test.state for test in every).items()))
    return Quality(states=states, judged=judged, toxic=toxic, distinguishing=distinguishing)


def _ran(outcomes: Mapping[str, Mapping[str, str]], candidate: str, test: WrittenTest) -> bool:
    return test.test_id in outcomes.get(candidate, {})
