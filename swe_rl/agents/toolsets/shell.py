"""Shell commands for every toolset: run one, refuse what cannot work without a terminal, lay out its result."""

from __future__ import annotations

import re
from collections.abc import Collection

from swe_rl.agents.observation import ToolError, clean_text
from swe_rl.agents.toolset import Workspace
from swe_rl.protocols import EnvStep
from swe_rl.types import ExecResult, StopReason

MAX_LINES = 80  # of a command's observation; beyond that the first and the last half are kept


async def run_command(workspace: Workspace, command: str) -> ExecResult:
    """`command` in a new shell in the repository. Raises ToolError for one that no shell can take."""
    if "\0" in command:
        raise ToolError("the command holds a NUL character")
    return await workspace.sandbox.exec(command, cwd=workspace.task.workdir)


def command_step(result: ExecResult, observation: str) -> EnvStep:
    """The observation of a command; a command that ended the sandbox ends the episode."""
    if result.outcome == "lost":
        return EnvStep(observation=observation, done=True, stop_reason=StopReason.ENV_KILLED)
    return EnvStep(observation=observation)


def refuse(command: str, programs: Collection[str], *, why: str) -> None:
    """Raises ToolError when the first word of `command` is one of `programs`. Later words are not looked at."""
    first = re.split(r"[\s;&|]", command.strip(), maxsplit=1)[0]
    if first in programs:
        raise ToolError(f"{first} is not allowed here: {why}")


def sections(result: ExecResult) -> str:
    """Both streams under their headings."""
    out, err = (clean_text(stream).rstrip("\n") for stream in (result.stdout, result.stderr))
    return f"[STDOUT]\n{out}\n[STDERR]\n{err}".replace("\n\n[STDERR]", "\n[STDERR]").rstrip("\n")


def cut_lines(text: str, *, max_lines: int = MAX_LINES) -> str:
    """`text` with its middle lines replaced by a note when it has more than `max_lines`."""
    lines = text.split("\n")
    if len(lines) <= max_lines:
        return text
    half = max_lines // 2
    note = f"... {len(lines) - 2 * half} lines left out: show fewer at a time, for example with head, tail or grep ..."
    return "\n".join([*lines[:half], note, *lines[-half:]])


def cut_characters(text: str, *, max_characters: int) -> str:
    """`text` with its middle replaced by a note when it is longer than `max_characters`."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    note = f"\n... {len(text) - 2 * half} characters left out ...\n"
    return text[:half] + note + text[len(text) - half :]
