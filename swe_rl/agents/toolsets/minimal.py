"""The toolset of the nano policy: short replies, and an edit that a small model can write."""

from __future__ import annotations

from collections.abc import Mapping

from swe_rl.agents.edits import replace_function, replace_text
from swe_rl.agents.observation import describe
from swe_rl.agents.toolset import Tool, Toolset, Workspace
from swe_rl.agents.toolsets.shell import command_step, run_command
from swe_rl.agents.visible_tests import run_visible_tests
from swe_rl.protocols import EnvStep
from swe_rl.types import StopReason


async def run_shell(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    """The plain `bash` tool: what the command printed, and its exit code where that says something."""
    result = await run_command(workspace, arguments["command"])
    return command_step(result, describe(result))


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


async def submit(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    """Ends the episode; whatever the arguments say, the repository as it is counts."""
    return EnvStep(observation="", done=True, stop_reason=StopReason.SUBMITTED)


BASH = Tool(
    name="bash",
    description="Runs a shell command in the repository. Each command gets a new shell, no input and a time limit.",
    parameters={"command": "the command, one or more lines"},
    handler=run_shell,
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
    name="submit", description="Ends the work and hands in the repository as it is.", parameters={}, handler=submit
)

MINIMAL = Toolset((BASH, REPLACE, EDIT_FUNCTION, TEST, SUBMIT))
