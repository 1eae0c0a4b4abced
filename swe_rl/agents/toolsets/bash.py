"""Nothing but a shell, as in mini-swe-agent: the agent hands in by a command that prints SENTINEL first."""

from __future__ import annotations

from collections.abc import Mapping

from swe_rl.agents.observation import clean_text, describe
from swe_rl.agents.toolset import Tool, Toolset, Workspace
from swe_rl.agents.toolsets.shell import command_step, cut_characters, run_command
from swe_rl.protocols import EnvStep
from swe_rl.types import StopReason

SENTINEL = "COMPLETE_TASK_AND_SUBMIT"
MAX_CHARACTERS = 10_000  # of an observation, head and tail kept


async def _bash(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    result = await run_command(workspace, arguments["command"])
    first = clean_text(result.stdout[:1024]).lstrip().partition("\n")[0].strip()
    if first == SENTINEL and result.outcome == "ok":
        return EnvStep(observation="", done=True, stop_reason=StopReason.SUBMITTED)
    return command_step(result, cut_characters(describe(result), max_characters=MAX_CHARACTERS))


BASH_ONLY = Toolset(
    (
        Tool(
            name="bash",
            description=(
                "Runs a shell command in the repository, in a new shell, without input, under a time limit. "
                f"`echo {SENTINEL}`, alone, ends the work and hands in the repository as it is."
            ),
            parameters={"command": "the command, one or more lines"},
            handler=_bash,
        ),
    )
)
