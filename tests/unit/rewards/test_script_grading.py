"""Tasks with a command of their own: order of steps, what a log decides, whose failure each ending is."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from test_grade_faults import PATCH, result

from swe_rl.errors import SandboxError
from swe_rl.rewards import grade
from swe_rl.rewards.script_grading import test_script as script_of
from swe_rl.types import ExecResult, Reward, SandboxSpec, Task

TASK = Task(
    task_id="data/one",
    source="unit",
    split="train",
    repo="r",
    base_commit="0" * 40,
    problem_statement="",
    fail_to_pass=("tests/test_m.py::test_a", "tests/test_m.py::test_b"),
    pass_to_pass=("tests/test_m.py::test_c",),
    gold_patch=PATCH,
    image="some/image",
    setup_cmd="echo setup",
    hidden_files={"/logs/secret.txt": b"x", "data/h.txt": b"y"},
    hidden_paths=("r2e_tests", "/elsewhere"),
    test_files=("checks/check_m.py",),
    test_patch=PATCH.replace(b"m.py", b"tests/test_m.py"),
    test_runner="script",
    test_cmd="pytest -rA tests/test_m.py",
    log_parser="pytest_verbose",
    pass_rule="all_passed",
)
START, END = "+ : '>>>>> Start Test Output'", "+ : '>>>>> End Test Output'"


def log(**status: str) -> bytes:
    lines = [f"tests/test_m.py::test_{name} {state}" for name, state in status.items()]
    return "\n".join(["noise", START, *lines, END, ""]).encode()


GOOD = log(a="PASSED", b="PASSED", c="PASSED")


class Machine:
    """Every sandbox of one script: what it is asked, in order; answers by the first word that fits."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.opened = 0

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec):
        self.opened += 1
        self.asked.append("open")
        yield self

    async def exec(self, command: str, *, timeout_s=None, cwd=None, stdin=None) -> ExecResult:
        assert cwd == "/testbed"
        kind = "setup" if command == "echo setup" else "tests" if "pytest" in command else "apply"
        if kind == "apply":
            kind = "patch" if b"a/m.py" in stdin else "test_patch"
        self.asked.append(kind)
        answer = self.answers.get(kind, result(GOOD) if kind == "tests" else result())
        return answer.pop(0) if isinstance(answer, list) else answer

    async def write_file(self, path: str, data: bytes) -> None:
        self.asked.append(path)
        if isinstance(error := self.answers.get("write"), OSError):
            raise error

    async def read_file(self, path: str) -> bytes:
        files = self.answers.get("files", {})
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swe_rl.rewards.grading.RETRY_PAUSE_S", 0.0)


async def run(machine: Machine, task: Task = TASK, patch: bytes = PATCH, **options: Any) -> Reward:
    return await grade(task, patch, spec=SandboxSpec(), pool=machine, **options)  # type: ignore[arg-type]


async def test_the_tests_come_after_the_patch() -> None:
    machine = Machine()
    reward = await run(machine)
    assert (reward.value, reward.tests_passed, reward.tests_total) == (1.0, 3, 3)
    assert machine.asked == [
        "open",
        "setup",
        "patch",
        "/logs/secret.txt",
        "/testbed/data/h.txt",
        "test_patch",
        "tests",
    ]


async def test_a_whole_evaluation_script_brings_its_tests_itself() -> None:
    own = f"set -x\n{START[2:]}\npytest -rA\n{END[2:]}\n"
    machine = Machine()
    assert (await run(machine, replace(TASK, test_cmd=own))).value == 1.0
    assert "test_patch" not in machine.asked
    assert script_of(replace(TASK, test_cmd=own)) == f"exec 2>&1\n{own}"
    wrapped = script_of(TASK)
    assert wrapped.index(START[4:]) < wrapped.index("pytest -rA") < wrapped.index(END[4:])


@pytest.mark.parametrize(
    ("status", "value", "f2p", "p2p"),
    [
        ({"a": "PASSED", "b": "FAILED", "c": "PASSED"}, 0.0, 0.5, 1.0),
        ({"a": "PASSED", "b": "PASSED"}, 0.0, 1.0, 0.0),
        ({"a": "FAILED", "b": "SKIPPED", "c": "XFAIL"}, 0.0, 0.0, 0.0),
    ],
)
async def test_the_rule_of_the_data_set_decides(status: dict[str, str], value: float, f2p: float, p2p: float) -> None:
    reward = await run(Machine(tests=result(log(**status))))
    assert (reward.value, reward.terms["f2p"], reward.terms["p2p"]) == (value, f2p, p2p)


async def test_its_exit_code_is_the_tests_business() -> None:
    for code in (1, 126, 127, 137):
        assert (await run(Machine(tests=result(GOOD, exit_code=code, outcome="nonzero")))).value == 1.0


@pytest.mark.parametrize(
    ("answers", "term"),
    [
        ({"patch": result(exit_code=1, outcome="nonzero")}, "apply_failed"),
        ({"test_patch": result(exit_code=1, outcome="nonzero")}, "tests_blocked"),
        ({"write": OSError(20, "not a directory")}, "tests_blocked"),
        ({"tests": result(outcome="timeout", exit_code=137)}, "timeout"),
        ({"tests": result(outcome="oom", exit_code=137)}, "oom"),
        ({"tests": replace(result(GOOD), stdout_bytes=1 << 30)}, "incomplete"),
    ],
)
async def test_failures_of_the_agent_are_zero(answers: dict[str, Any], term: str) -> None:
    reward = await run(Machine(**answers))
    assert (reward.value, reward.terms[term]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("answers", "patch"),
    [
        ({"setup": result(exit_code=1, outcome="nonzero")}, PATCH),
        ({"test_patch": result(exit_code=1, outcome="nonzero")}, b""),
        ({"tests": result(outcome="lost")}, PATCH),
        ({"write": OSError(5, "input/output error")}, PATCH),
    ],
)
async def test_failures_of_the_machine_are_no_reward(answers: dict[str, Any], patch: bytes) -> None:
    machine = Machine(**answers)
    with pytest.raises(SandboxError):
        await run(machine, patch=patch, trusted=not patch)
    assert machine.opened == 3


async def test_other_tests_that_fail_are_asked_again() -> None:
    flaky = Machine(tests=[result(log(a="PASSED", b="PASSED", c="FAILED")), result(GOOD)])
    reward = await run(flaky)
    assert (reward.value, reward.terms["flaky"], flaky.opened) == (1.0, 1.0, 2)


async def test_hidden_places_are_protected() -> None:
    for path in (b"r2e_tests/test_1.py", b"data/h.txt", b"checks/check_m.py"):
        reward = await run(Machine(), patch=PATCH.replace(b"m.py", path))
        assert (reward.value, reward.terms["tamper"], reward.terms["empty"]) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("files", "value"),
    [
        ({"/logs/verifier/reward.txt": b"1\n"}, 1.0),
        ({"/logs/verifier/reward.txt": b"0.5"}, 0.0),
        ({"/logs/verifier/reward.json": b'{"reward": 1.0}', "/logs/verifier/reward.txt": b"0"}, 1.0),
        ({}, 0.0),
    ],
)
async def test_a_verifier_writes_its_verdict(files: dict[str, bytes], value: float) -> None:
    task = replace(TASK, pass_rule="reward_file", fail_to_pass=(), pass_to_pass=())
    reward = await run(Machine(files=files), task)
    assert reward.value == value
    assert reward.terms.get("incomplete", 0.0) == float(not files)


@pytest.mark.parametrize("text", [b"good", b"", b"NaN", b"-Infinity", b'{"reward": null}', b"[" * 100_000, b"\xff"])
async def test_a_verdict_that_is_no_number_is_worth_nothing(text: bytes) -> None:
    """Code under test can write the file as well: that must not look like trouble of the machine."""
    task = replace(TASK, pass_rule="reward_file", fail_to_pass=(), pass_to_pass=())
    machine = Machine(files={"/logs/verifier/reward.txt": text})
    reward = await run(machine, task)
    assert (reward.value, reward.terms["f2p"], reward.terms["incomplete"]) == (0.0, 1.0, 1.0)
    assert machine.opened == 2
