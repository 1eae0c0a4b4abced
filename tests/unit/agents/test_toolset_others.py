"""The sweagent and bash toolsets, memory tools, and questions to a human, on a real sandbox of each backend."""

from __future__ import annotations

import asyncio
import io
import random
import sys
from dataclasses import replace

import pytest
from tool_calls import ON_BOTH_BACKENDS, TASK, open_tools

from swe_rl.agents.toolsets import TOOLSETS, make_toolset
from swe_rl.agents.toolsets.human import NO_ANSWER, ScriptedHuman, TerminalHuman, charge_questions
from swe_rl.config import AgentConfig
from swe_rl.protocols import EnvStep
from swe_rl.types import Completion, Reward, StopReason, ToolCall, Trajectory, Turn

pytestmark = ON_BOTH_BACKENDS


async def test_sweagent_editor_shows_any_file_whole_and_has_no_undo() -> None:
    long = b"".join(b"def f%d():\n    a = 1\n    b = 2\n    c = 3\n    return a\n" % i for i in range(30))
    async with open_tools("sweagent", {"n.txt": b"n\n", "long.py": long, "d/x.md": b"x"}) as tools:
        assert await tools.call("str_replace_editor", command="view", path="n.txt") == "     1\tn"
        assert (await tools.call("str_replace_editor", command="view", path="long.py")).count("\n") == 149
        assert "/testbed/d/x.md" in await tools.call("str_replace_editor", command="view", path=".")
        got = await tools.call("str_replace_editor", command="undo_edit", path="n.txt")
        assert got == "error: no command undo_edit; use view, create, str_replace, insert"
        got = await tools.call("str_replace_editor", command="view", path="long.py", concise="true")
        assert got == "error: str_replace_editor has no parameter concise"
        await tools.call("str_replace_editor", command="str_replace", path="n.txt", old_str="n", new_str="m")
        await tools.call("str_replace_editor", command="insert", path="n.txt", insert_line="1", new_str="o")
        await tools.call("str_replace_editor", command="create", path="c.txt", file_text="c")
        assert (await tools.read("n.txt"), await tools.read("c.txt")) == (b"m\no\n", b"c")


async def test_sweagent_bash_refuses_what_waits_for_a_terminal() -> None:
    async with open_tools("sweagent") as tools:
        assert await tools.call("bash", command="echo a; exit 2") == "a\nexit 2"
        assert await tools.call("execute_bash", command="echo a") == "a"
        for command in ("vim a.py", "nano", "less x", "tail -f log", "python", " python3 ", "make test", "tail -f"):
            assert "is not allowed here: it needs a terminal or does not end" in await tools.call(
                "bash", command=command
            )
        for command in ("python3 -c 'print(1)'", "cat calc.py | tail -n 1", "echo vim"):
            assert "not allowed" not in await tools.call("bash", command=command)
        for name in ("submit", "finish"):
            assert (await tools.step(name)).stop_reason is StopReason.SUBMITTED


async def test_bash_submits_by_its_first_output_line_and_exit_code_zero() -> None:
    async with open_tools("bash", {"a": b"1\n"}) as tools:
        assert await tools.call("bash", command="cd /; export X=1; cat /testbed/a; exit 3") == "1\nexit 3"
        assert await tools.call("bash", command="pwd; echo $X") == "/testbed"
        for command in ("echo x; echo COMPLETE_TASK_AND_SUBMIT", "echo COMPLETE_TASK_AND_SUBMIT; exit 1"):
            assert not (await tools.step("bash", command=command)).done
        done = EnvStep(observation="", done=True, stop_reason=StopReason.SUBMITTED)
        assert await tools.step("bash", command="echo; echo COMPLETE_TASK_AND_SUBMIT; echo more") == done
        got = await tools.call("bash", command="head -c 12000 /dev/zero | tr '\\0' a; printf end")
        assert got == "a" * 5000 + "\n... 2003 characters left out ...\n" + "a" * 4997 + "end"
        assert await tools.call("submit") == "error: no tool submit; use bash"


async def test_no_command_kills_the_sandbox_from_inside() -> None:
    for name in ("r2e", "nebius", "sweagent", "bash"):
        async with open_tools(name) as tools:
            tool = "execute_bash" if name == "r2e" else "bash"
            key = "cmd" if name == "r2e" else "command"
            got = await tools.step(tool, **{key: "kill -9 1; echo alive"})
            assert got.done is False
            assert "alive" in got.observation


async def test_plan_and_notes_are_kept_apart_from_the_repository() -> None:
    toolset = make_toolset(AgentConfig(toolset="bash", memory_tools=["plan", "note"]))
    assert [tool.name for tool in toolset.tools] == ["bash", "plan", "note"]
    async with open_tools(toolset) as tools:
        assert await tools.call("plan") == "there is no plan yet"
        assert await tools.call("note") == "there are no notes yet"
        assert await tools.call("plan", text="1. look\n2. edit") == "the plan is kept"
        assert await tools.call("plan", text="only edit") == "the plan is kept"
        assert await tools.call("plan") == "only edit"
        assert await tools.call("note", text="bug in calc.py") == "note 1 is kept"
        assert await tools.call("note", text="tests pass") == "note 2 is kept"
        assert await tools.call("note") == "1. bug in calc.py\n2. tests pass"
        assert "at most 10000" in await tools.call("note", text="x" * 10_000)
        assert "at most 10000" in await tools.call("plan", text="x" * 10_001)
        fork = tools.workspace.fork(tools.workspace.sandbox)
        fork.notes.append("of the fork")
        assert len(tools.workspace.notes) == 2


async def test_memory_tools_are_absent_unless_asked_for() -> None:
    assert make_toolset(AgentConfig(toolset="r2e")) is TOOLSETS["r2e"]
    async with open_tools("r2e") as tools:
        assert (await tools.call("plan")).startswith("error: no tool plan")


async def test_a_scripted_human_answers_by_pattern() -> None:
    toolset = make_toolset(AgentConfig(toolset="nebius", ask_human="scripted"))
    task = replace(TASK, meta={"answers": [["(?i)which sign", "plus"], ["file", "calc.py"]]})
    async with open_tools(toolset, task=task, human=ScriptedHuman()) as tools:
        assert (await tools.call("ask_human", question="Which SIGN is meant?")).startswith("plus\n(Current directory:")
        assert (await tools.call("ask_human", question="In which file?")).startswith("calc.py\n")
        assert (await tools.call("ask_human", question="Why?")).startswith(NO_ANSWER)
    async with open_tools(toolset) as tools:
        assert (await tools.call("ask_human", question="Why?")).startswith("error: nobody is there")


async def test_a_human_at_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("use +\n\n"))
    human = TerminalHuman()
    assert await human.answer(TASK, "which sign?") == "use +"
    assert await asyncio.wait_for(human.answer(TASK, "sure?"), 5) == NO_ANSWER  # an empty line
    assert await asyncio.wait_for(human.answer(TASK, "there?"), 5) == NO_ANSWER  # the end of the input
    assert await asyncio.wait_for(human.answer(TASK, "there?"), 5) == NO_ANSWER
    assert "add-0 asks: which sign?" in capsys.readouterr().err


def test_questions_cost_reward() -> None:
    completion = Completion(
        token_ids=[1], rollout_logprobs=[0.0], finish_reason="stop", policy_version=0, policy_version_max=0
    )
    names = ["ask_human", "bash", "ask_human", None]
    turns = [
        Turn(
            context_ids=[0],
            completion=completion,
            tool_call=None if name is None else ToolCall(name=name, arguments={}),
            observation="",
        )
        for name in names
    ]
    trajectory = Trajectory(
        trajectory_id="t",
        task_id="t",
        group_id="g",
        rollout_index=0,
        turns=turns,
        stop_reason=StopReason.SUBMITTED,
        temperature=1.0,
    )
    reward = Reward(value=1.0, terms={"tests": 1.0})
    got = charge_questions(reward, trajectory, cost=0.125)
    assert got == Reward(value=0.75, terms={"tests": 1.0, "questions": -0.25})
    assert charge_questions(reward, trajectory, cost=0.0) == reward
    assert charge_questions(reward, replace(trajectory, turns=turns[1:2]), cost=0.125) == reward


HOSTILE = [
    "", " ", "\0", "\n", "a\nb", "-rf", "--", "'", '"', "$(id)", "`id`", "\ud800", "\udcff", "\x85", "\u2028", "é漢",
    "%s%n", "/", ".", "..", "../../etc/passwd", "/proc/self/mem", "/dev/zero/x", "/dev/null", "x" * 5000, "a/" * 3000,
    "~", "*", "calc.py", "/testbed/calc.py", "link", "bin", "pipe", "deep/a", "0", "1", "-1", "9" * 30, "1:2", "[1, 2]",
    "true", "no", "view", "create", "str_replace", "insert", "undo_edit", "return", "def add(", "open calc.py",
    "edit 1:1 x", "(((" * 200,
]  # fmt: skip


@pytest.mark.parametrize("name", list(TOOLSETS))
async def test_whatever_the_arguments_a_call_ends_in_an_observation(name: str) -> None:
    rng = random.Random(name)
    toolset = make_toolset(AgentConfig(toolset=name, memory_tools=["plan", "note"], ask_human="scripted"))
    files = {**TASK.tree, "bin": b"\0\1" * 100, "latin.py": b"# \xe9\n", "deep/a/b/c.py": b"x = 1\n"}
    async with open_tools(toolset, files, human=ScriptedHuman(), command_s=1.0) as tools:
        await tools.workspace.sandbox.exec("ln -s link link; mkfifo pipe; chmod 000 deep")
        for _ in range(120):
            tool = rng.choice(toolset.tools)
            keys = [*tool.parameters, *(key for key in tool.optional if rng.random() < 0.6)]
            got = await tools.step(tool.name, **{key: rng.choice(HOSTILE) for key in keys})
            assert isinstance(got.observation, str)
            got.observation.encode()
        assert (await tools.workspace.sandbox.exec("echo alive")).stdout == b"alive\n"
