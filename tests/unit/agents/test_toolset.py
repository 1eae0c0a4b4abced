"""Tools on a fake sandbox: what they do, and that every mistake is an observation."""

from __future__ import annotations

import json

import pytest

from swe_rl.agents import FORMATS, TOOLSETS, SweEnvironment, load_prompt
from swe_rl.agents.observation import clean_text, describe
from swe_rl.agents.visible_tests import summarize
from swe_rl.errors import ConfigError, SandboxError, SandboxLost
from swe_rl.protocols import EnvStep
from swe_rl.tasks.test_runner import Verdict
from swe_rl.testing import FakeSandbox, exec_result, make_task
from swe_rl.types import ExecResult, Outcome, StopReason, ToolCall

TASK = make_task()


async def call(sandbox: FakeSandbox, name: str, /, **arguments: str) -> EnvStep:
    env = SweEnvironment(sandbox, prompt=load_prompt("nano"), action_format=FORMATS["xml"])
    await env.reset(TASK)
    return await env.step(ToolCall(name=name, arguments=arguments))


def sandbox_of(**commands: object) -> FakeSandbox:
    return FakeSandbox({f"/testbed/{path}": data for path, data in TASK.tree.items()}, commands=commands)  # type: ignore[arg-type]


async def test_bash() -> None:
    got = await call(sandbox_of(ls=exec_result("calc.py\n")), "bash", command="ls")
    assert got == EnvStep(observation="calc.py")
    assert (await call(sandbox_of(ls=exec_result()), "bash", command="ls")).observation == "exit 0"


async def test_edits() -> None:
    sandbox = sandbox_of()
    assert (await call(sandbox, "replace", path="calc.py", old="a - b", new="a + b")).observation == "ok"
    assert sandbox.files["/testbed/calc.py"] == b"def add(a, b):\n    return a + b\n"
    body = "def add(a, b):\n    return b + a"
    assert (await call(sandbox, "edit_function", path="/testbed/calc.py", name="add", body=body)).observation == "ok"
    assert sandbox.files["/testbed/calc.py"] == b"def add(a, b):\n    return b + a\n"


async def test_submit() -> None:
    assert await call(sandbox_of(), "submit") == EnvStep(observation="", done=True, stop_reason=StopReason.SUBMITTED)


@pytest.mark.parametrize(
    ("name", "arguments", "want"),
    [
        ("rm", {}, "error: no tool rm; use bash, replace, edit_function, test, submit"),
        ("bash", {}, "error: bash needs command"),
        ("replace", {"path": "x"}, "error: replace needs old, new"),
        ("submit", {"result": "x"}, "error: submit has no parameter result"),
        ("bash", {"command": "a\0b"}, "error: the command holds a NUL character"),
        ("replace", {"path": "no.py", "old": "a", "new": "b"}, "error: No such file or directory"),
        ("replace", {"path": "calc.py", "old": "zz", "new": "b"}, "error: old not found"),
        ("edit_function", {"path": "calc.py", "name": "f", "body": "def f(): pass"}, "error: no function f"),
    ],
)
async def test_mistakes_are_observations(name: str, arguments: dict[str, str], want: str) -> None:
    sandbox = sandbox_of()
    before = dict(sandbox.files)
    assert await call(sandbox, name, **arguments) == EnvStep(observation=want)
    assert sandbox.files == before


async def test_trouble_passes_through_and_a_lost_sandbox_ends_the_episode() -> None:
    with pytest.raises(SandboxError):
        await call(sandbox_of(ls=SandboxLost("gone")), "bash", command="ls")
    got = await call(sandbox_of(ls=exec_result("bye", outcome="lost", exit_code=137)), "bash", command="ls")
    assert got == EnvStep(observation="bye\nthe sandbox ended", done=True, stop_reason=StopReason.ENV_KILLED)


@pytest.mark.parametrize(
    ("outcome", "exit_code", "want"),
    [
        ("ok", 0, "out\nerr"),
        ("nonzero", 3, "out\nerr\nexit 3"),
        ("timeout", 137, "out\nerr\ntimeout: killed after 0 s"),
        ("oom", 137, "out\nerr\nkilled: out of memory"),
        ("pids_limit", 1, "out\nerr\nkilled: too many processes"),
        ("disk_full", 1, "out\nerr\ndisk full"),
        ("output_limit", 137, "out\nerr\nkilled: too much output"),
    ],
)
def test_describe(outcome: Outcome, exit_code: int, want: str) -> None:
    assert describe(exec_result("out\n", stderr="err\n", exit_code=exit_code, outcome=outcome)) == want


@pytest.mark.parametrize(
    ("data", "want"),
    [
        (b"\x1b[1;31mred\x1b[0m\x1b]0;title\x07!", "red!"),
        (b"10%\r50%\r100%\nok\r\n", "100%\nok\n"),
        (b"done\r", "done"),
        (b"a\x00\x08\x7fb\tc", "ab\tc"),
        (b"\xff\xc3(", "��("),
        ("é漢".encode(), "é漢"),
    ],
)
def test_clean_text(data: bytes, want: str) -> None:
    assert clean_text(data) == want


@pytest.mark.parametrize(
    ("statuses", "want"),
    [
        ([("a", "passed", ""), ("b", "passed", "")], "2 passed"),
        ([("t.py::test_x", "failed", "AssertionError: 1 != 2")], "1 failed: test_x: AssertionError: 1 != 2"),
        ([("t::a", "passed", ""), ("t::b", "missing", "")], "1 failed, 1 passed: b: missing"),
        ([(f"t::x{i}", "error", "E") for i in range(5)], "5 failed: x0: E; x1: E; x2: E; ..."),
    ],
)
def test_summary_of_tests(statuses: list[tuple[str, str, str]], want: str) -> None:
    assert summarize({i: Verdict(s, m) for i, s, m in statuses}) == want


async def test_test_tool_reads_only_the_framed_report() -> None:
    async def run(sandbox: FakeSandbox, command: str) -> ExecResult:
        assert sandbox.files["/tmp/.runner.py"]
        assert sandbox.stdin is not None
        nonce, file, *_ = sandbox.stdin.decode().split("\n")
        assert file == "tests/test_calc.py"
        row = json.dumps({"id": f"{file}::test_zero", "status": "failed", "message": "AssertionError"})
        return exec_result(f"noise 3 passed\n{nonce} begin 1\n{nonce} {row}\n{nonce} end 1\n")

    got = await call(sandbox_of(python3=run), "test")
    assert got.observation == "1 failed: test_zero: AssertionError"
    dead = await call(sandbox_of(python3=exec_result("Killed", exit_code=137, outcome="timeout")), "test")
    assert dead.observation == "Killed\ntimeout: killed after 0 s"


async def test_prompts() -> None:
    nano = load_prompt("nano").messages(TASK, tools=TOOLSETS["minimal"].tools, action_format=FORMATS["xml"])
    assert nano == [{"role": "user", "content": "add(1, 2) gave -1, expected 3."}]
    system, user = load_prompt("default").messages(TASK, tools=TOOLSETS["minimal"].tools, action_format=FORMATS["xml"])
    for tool in TOOLSETS["minimal"].tools:
        assert f"- {tool.name}: {tool.description}" in system["content"]
        for key, meaning in tool.parameters.items():
            assert f"{key}: {meaning}" in system["content"]
    assert "<function=bash><parameter=command>grep -rn 'def parse' .</parameter></function>" in system["content"]
    assert "/testbed" in user["content"]
    assert TASK.problem_statement in user["content"]
    assert json.dumps([system, user])
    with pytest.raises(ConfigError, match="unknown"):
        load_prompt("other")
