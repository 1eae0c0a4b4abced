"""SWE-agent's later tools: str_replace_editor, bash, submit."""

from __future__ import annotations

from collections.abc import Mapping

from swe_rl.agents.observation import ToolError, describe
from swe_rl.agents.toolset import Tool, Toolset, Workspace
from swe_rl.agents.toolsets.editor import EditorKind, make_editor
from swe_rl.agents.toolsets.minimal import SUBMIT
from swe_rl.agents.toolsets.shell import command_step, refuse, run_command
from swe_rl.protocols import EnvStep

REFUSED = ("vim", "vi", "emacs", "nano", "less", "more", "nohup", "gdb", "top", "make")  # as the first word
REFUSED_ALONE = ("python", "python3", "ipython", "bash", "sh", "su", "tail -f")  # without anything after them


async def _bash(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    command = arguments["command"]
    why = "it needs a terminal or does not end"
    refuse(command, REFUSED, why=why)
    if command.strip() in REFUSED_ALONE or command.strip().startswith("tail -f "):
        raise ToolError(f"{command.strip()} is not allowed here: {why}")
    result = await run_command(workspace, command)
    return command_step(result, describe(result))


SWEAGENT = Toolset(
    (
        make_editor("str_replace_editor", EditorKind(undo=False, for_python=False)),
        Tool(
            name="bash",
            description="Runs a shell command in the repository, in a new shell, without input, under a time limit.",
            parameters={"command": "the command, one or more lines; nothing interactive"},
            handler=_bash,
        ),
        SUBMIT,
    ),
    synonyms={"execute_bash": "bash", "finish": "submit"},
)
