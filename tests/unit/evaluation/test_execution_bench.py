"""Existing and written tests in real sandboxes: validity, tricks of candidates, and whose failure is what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_parts import require

from swe_rl.errors import SandboxError
from swe_rl.evaluation.execution_bench import ExecutionBench
from swe_rl.evaluation.execution_tests import WrittenTest
from swe_rl.sandbox import open_sandbox
from swe_rl.tasks import materialize, tree_commit, tree_diff
from swe_rl.types import Limits, SandboxSpec, Task

BUGGY = b"def double(x):\n    return x + x + 1\n\n\ndef half(x):\n    return x / 2\n"
TREE = {
    "pkg/__init__.py": b"",
    "pkg/m.py": BUGGY,
    "tests/test_seen.py": b"from pkg.m import double, half\n\n\ndef test_half():\n    assert half(2) == 1\n\n\n"
    b"def test_double():\n    assert double(1) == 2\n",
}
TASK = Task(
    task_id="unit/double",
    source="unit",
    split="train",
    repo="unit",
    base_commit=tree_commit(TREE),
    problem_statement="double(4) gives 9",
    fail_to_pass=("tests/test_hidden.py::test_double",),
    pass_to_pass=(),
    gold_patch=tree_diff({"pkg/m.py": BUGGY}, {"pkg/m.py": BUGGY.replace(b" + 1", b"")}),
    tree=TREE,
    hidden_files={
        "tests/test_hidden.py": b"from pkg.m import double\n\n\ndef test_double():\n    assert double(4) == 8\n"
    },
    timeout_s=20.0,
)
RIGHT = TASK.gold_patch
WRONG = tree_diff({"pkg/m.py": BUGGY}, {"pkg/m.py": BUGGY.replace(b"x / 2", b"x")})
BROKEN = tree_diff({"pkg/m.py": BUGGY}, {"pkg/m.py": b"def double(:\n"})
TESTS = b"""from pkg.m import double, half


def test_issue():
    assert double(4) == 8


def test_true_before():
    assert half(8) == 4


def test_sure_of_a_wrong_answer():
    assert half(8) == 8


def test_raises():
    assert nothing
"""


def writes(content: bytes, path: str = "test_issue.py") -> bytes:
    return tree_diff({}, {path: content})


@pytest.fixture
async def bench(tmp_path: Path) -> ExecutionBench:
    try:
        async with open_sandbox(SandboxSpec()):
            pass
    except SandboxError as err:
        require(False, f"a sandbox ({err})")
    tree = materialize(TASK, tmp_path / "trees")

    packages = str(Path(pytest.__file__).parents[1])

    async def spec_of(task: Task) -> SandboxSpec:
        spec = SandboxSpec(layers=(str(tree),), limits=Limits(command_s=20.0))
        if task.test_runner != "pytest":  # which a real task brings as a mounted directory
            return spec
        return replace(spec, readonly_mounts=((packages, "/opt/packages"),), env={"PYTHONPATH": "/opt/packages"})

    return ExecutionBench(spec_of=spec_of, lease=open_sandbox, limit_s=15.0)


async def test_regression_tests_are_those_that_pass_without_a_patch(bench: ExecutionBench) -> None:
    assert await bench.regression_tests(TASK) == ["tests/test_seen.py::test_half"]
    unstable = replace(TASK, meta={"unstable_tests": ["tests/test_seen.py::test_half"]})
    assert await bench.regression_tests(unstable) == []
    assert await bench.regression_tests(replace(TASK, test_runner="script")) == []


async def test_the_same_with_pytest_as_runner(bench: ExecutionBench) -> None:
    task = replace(TASK, test_runner="pytest")
    assert await bench.regression_tests(task) == ["tests/test_seen.py::test_half"]
    tests = await bench.written_tests(task, writes(TESTS, "tests/test_issue.py"), name="a")
    assert [(t.function, t.state) for t in tests if t.valid] == [
        ("test_issue", "valid"),
        ("test_sure_of_a_wrong_answer", "valid"),
        ("test_raises", "valid"),
    ]
    found = await bench.run(task, RIGHT, regression=["tests/test_seen.py::test_half"], tests=tests[:1])
    assert found.regression == {"tests/test_seen.py::test_half": "passed"}
    assert found.reproduction == {"a::test_issue": "resolved"}


async def test_written_tests_are_examined_on_the_unpatched_program(bench: ExecutionBench) -> None:
    tests = await bench.written_tests(TASK, writes(TESTS), name="agent/0")
    assert {test.function: test.state for test in tests} == {
        "test_issue": "valid",
        "test_true_before": "resolved_before",
        "test_sure_of_a_wrong_answer": "valid",  # toxic, which only the hidden tests can tell
        "test_raises": "valid",
    }
    assert all(test.source == TESTS and test.task_id == TASK.task_id for test in tests)
    reward = await bench.grade_tests(TASK, writes(TESTS))
    assert (reward.value, reward.tests_passed, reward.tests_total) == (1.0, 3, 4)


@pytest.mark.parametrize(
    ("patch", "state"),
    [
        (b"", "empty"),
        (b"diff --git a/gone.py b/gone.py\n--- a/gone.py\n+++ b/gone.py\n@@ -1 +1 @@\n-x\n+y\n", "apply_failed"),
        (writes(b"x = 1\n"), "no_test"),
        (writes(b"def test_a(:\n"), "syntax"),
        (writes(b"def test_a():\n    assert 0\n", "notes.py"), "no_test"),
        (RIGHT, "no_test"),  # it repaired the program instead
        (writes(b"from pkg.m import gone\n\n\ndef test_a():\n    assert 0\n"), "other_before"),
    ],
)
async def test_what_did_not_become_a_test_says_why(bench: ExecutionBench, patch: bytes, state: str) -> None:
    (test,) = await bench.written_tests(TASK, patch, name="agent/0")
    assert test.state == state
    assert (await bench.grade_tests(TASK, patch)).value == 0.0


async def test_candidates_are_told_apart(bench: ExecutionBench) -> None:
    tests = [t for t in await bench.written_tests(TASK, writes(TESTS), name="a") if t.valid][:2]
    existing = ["tests/test_seen.py::test_half"]
    want = {
        RIGHT: ("passed", "resolved", "reproduced"),
        WRONG: ("failed", "reproduced", "resolved"),
        BROKEN: ("error", "other", "other"),
        b"": ("passed", "reproduced", "reproduced"),
        b"no patch at all\n": ("missing", "other", "other"),
        b"diff --git a/gone.py b/gone.py\n--- a/gone.py\n+++ b/gone.py\n@@ -1 +1 @@\n-x\n+y\n": (
            *("missing", "other", "other"),
        ),
    }
    for patch, statuses in want.items():
        found = await bench.run(TASK, patch, regression=existing, tests=tests)
        got = (*found.regression.values(), *found.reproduction.values())
        assert got == statuses, (patch, got)


async def test_a_candidate_cannot_bring_its_own_tests(bench: ExecutionBench) -> None:
    easy = b"def test_half():\n    pass\n\n\ndef test_issue():\n    pass\n"
    patch = tree_diff(TREE, {**TREE, "tests/test_seen.py": easy, "test_reproduction_0.py": easy, "test_issue.py": easy})
    tests = [t for t in await bench.written_tests(TASK, writes(TESTS), name="a") if t.function == "test_issue"]
    found = await bench.run(TASK, patch, regression=["tests/test_seen.py::test_half"], tests=tests)
    assert found.reproduction == {"a::test_issue": "reproduced"}
    assert found.regression == {"tests/test_seen.py::test_half": "passed"}


async def test_scripts_print_their_outcome(bench: ExecutionBench) -> None:
    task = replace(TASK, test_runner="script")
    script = (
        b"import sys\nsys.path.insert(0, '.')\nfrom pkg.m import double\n"
        b"print('Issue resolved' if double(4) == 8 else 'Issue reproduced' if double(4) == 9 else 'Other issues')\n"
    )
    (test,) = await bench.written_tests(task, writes(script), name="a")
    assert test.valid
    for patch, outcome in ((RIGHT, "resolved"), (WRONG, "reproduced"), (BROKEN, "other"), (b"", "reproduced")):
        assert (await bench.run(task, patch, regression=(), tests=[test])).reproduction == {"a::test_issue.py": outcome}
    (sly,) = await bench.written_tests(task, writes(b"print('Issue unresolved')\n"), name="a")
    assert sly.state == "other_before"


class Flaky:
    """Leases of which the first `failures` are lost on the way."""

    def __init__(self, failures: int) -> None:
        self.failures, self.opened = failures, 0

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec) -> AsyncIterator[Any]:
        self.opened += 1
        if self.opened <= self.failures:
            raise SandboxError("the machine is full")
        async with open_sandbox(spec) as sandbox:
            yield sandbox


async def test_trouble_of_the_machine_is_repeated_and_never_a_result(bench: ExecutionBench) -> None:
    test = WrittenTest(test_id="a", task_id=TASK.task_id, path="test_issue.py", source=TESTS, function="test_issue")
    once = Flaky(2)
    found = await replace(bench, lease=once.lease).run(TASK, RIGHT, regression=(), tests=[test])
    assert found.reproduction == {"a": "resolved"}
    assert once.opened == 3
    with pytest.raises(SandboxError, match="failed 3 times"):
        await replace(bench, lease=Flaky(3).lease).run(TASK, RIGHT, regression=(), tests=[test])


class Broken:
    """The first sandbox does not even let a test be written down, which looks like a doing of the candidate."""

    def __init__(self) -> None:
        self.opened = 0

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec) -> AsyncIterator[Any]:
        self.opened += 1
        async with open_sandbox(spec) as sandbox:
            if self.opened == 1:
                made = await sandbox.exec("mkdir test_reproduction_0.py", cwd=TASK.workdir, timeout_s=5)
                assert made.exit_code == 0
            yield sandbox


async def test_without_retries_a_second_sandbox_still_has_to_agree(bench: ExecutionBench) -> None:
    """Retries are of lost sandboxes: a run that came to nothing is no failure of the candidate before it did twice."""
    test = WrittenTest(test_id="a", task_id=TASK.task_id, path="test_issue.py", source=TESTS, function="test_issue")
    once = Broken()
    found = await replace(bench, lease=once.lease, retries=0).run(TASK, RIGHT, regression=(), tests=[test])
    assert found.reproduction == {"a": "resolved"}
    assert once.opened == 2
    with pytest.raises(SandboxError, match="failed 1 times"):
        await replace(bench, lease=Flaky(1).lease, retries=0).run(TASK, RIGHT, regression=(), tests=[test])


async def test_a_candidate_that_hangs_resolves_nothing(bench: ExecutionBench) -> None:
    hangs = tree_diff({"pkg/m.py": BUGGY}, {"pkg/m.py": b"import time\ntime.sleep(60)\n" + BUGGY})
    tests = [WrittenTest(test_id="a", task_id=TASK.task_id, path="test_issue.py", source=TESTS, function="test_issue")]
    quick = replace(bench, limit_s=2.0)
    found = await quick.run(TASK, hangs, regression=["tests/test_seen.py::test_half"], tests=tests)
    assert found.reproduction == {"a": "other"}
    assert found.regression != {"tests/test_seen.py::test_half": "passed"}
