"""The tools of the agent: what each takes and what it does, side by side.

A mistake of the policy (unknown tool, missing argument, text not found) is an observation. Trouble of the machine is a
SandboxError and passes through.
"""

from __future__ import annotations

import posixpath
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from swe_rl.agents.edits import EditError, replace_function, replace_text
from swe_rl.agents.observation import describe
from swe_rl.agents.visible_tests import run_visible_tests
from swe_rl.protocols import EnvStep, Sandbox
from swe_rl.types import StopReason, Task, ToolCall

Handler = Callable[["Workspace", Mapping[str, str]], Awaitable[EnvStep]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What a tool works on."""

    sandbox: Sandbox
    task: Task

    def path(self, path: str) -> str:
        """Absolute path inside the sandbox; a relative one starts at the repository."""
        return posixpath.normpath(posixpath.join(self.task.workdir, path.strip()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, str]  # name -> meaning; all are required
    handler: Handler


class Toolset:
    """Calls tools by name; every mistake in the call comes back as text."""

    def __init__(self, tools: tuple[Tool, ...]) -> None:
        self.tools = tools
        self._by_name = {tool.name: tool for tool in tools}

    async def call(self, call: ToolCall, *, workspace: Workspace) -> EnvStep:
        """One tool call. Raises SandboxError for trouble of the machine only."""
        tool = self._by_name.get(call.name)
        if tool is None:
            return EnvStep(observation=f"error: no tool {call.name}; use {', '.join(self._by_name)}")
        if missing := [key for key in tool.parameters if key not in call.arguments]:
            return EnvStep(observation=f"error: {call.name} needs {', '.join(missing)}")
        if unknown := [key for key in call.arguments if key not in tool.parameters]:
            return EnvStep(observation=f"error: {call.name} has no parameter {', '.join(unknown)}")
        try:
            return await tool.handler(workspace, call.arguments)
        except EditError as err:
            return EnvStep(observation=f"error: {err}")
        except OSError as err:
            return EnvStep(observation=f"error: {err.strerror or err}")


async def _bash(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    command = arguments["command"]
    if "\0" in command:
        raise EditError("the command holds a NUL character")
    result = await workspace.sandbox.exec(command, cwd=workspace.task.workdir)
    if result.outcome == "lost":
        return EnvStep(observation=describe(result), done=True, stop_reason=StopReason.ENV_KILLED)
    return EnvStep(observation=describe(result))


async def _replace(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    path = workspace.path(arguments["path"])
    data = await workspace.sandbox.read_file(path)
    await workspace.sandbox.write_file(path, replace_text(data, old=arguments["old"], new=arguments["new"]))
    return EnvStep(observation="ok")


async def _edit_function(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    path = workspace.path(arguments["path"])
    data = await workspace.sandbox.read_file(path)
    name = arguments["name"].strip()
    await workspace.sandbox.write_file(path, replace_function(data, name=name, body=arguments["body"]))
    return EnvStep(observation="ok")


async def _test(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    return EnvStep(observation=await run_visible_tests(workspace.sandbox, task=workspace.task))


async def _submit(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    return EnvStep(observation="", done=True, stop_reason=StopReason.SUBMITTED)


BASH = Tool(
    name="bash",
    description="Runs a shell command in the repository. Each command gets a new shell, no input and a time limit.",
    parameters={"command": "the command, one or more lines"},
    handler=_bash,
)
REPLACE = Tool(
    name="replace",
    description="Replaces text in a file. The old text must occur exactly once, spaces and newlines included.",
    parameters={"path": "file, relative to the repository", "old": "text to replace", "new": "text to put there"},
    handler=_replace,
)
EDIT_FUNCTION = Tool(
    name="edit_function",
    description="Replaces one whole Python function or method; its decorators stay unless the body has its own.",
    parameters={
        "path": "file, relative to the repository",
        "name": "function, or Class.method",
        "body": "the complete new function, from def to its end",
    },
    handler=_edit_function,
)
TEST = Tool(name="test", description="Runs the tests of the repository.", parameters={}, handler=_test)
SUBMIT = Tool(
    name="submit", description="Ends the work and hands in the repository as it is.", parameters={}, handler=_submit
)

DEFAULT_TOOLS = Toolset((BASH, REPLACE, EDIT_FUNCTION, TEST, SUBMIT))
