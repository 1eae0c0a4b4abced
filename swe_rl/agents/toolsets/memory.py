"""Optional tools with which the policy keeps something for later turns, also when old observations are dropped."""

from __future__ import annotations

from collections.abc import Mapping

from swe_rl.agents.observation import ToolError
from swe_rl.agents.toolset import Tool, Workspace
from swe_rl.protocols import EnvStep

MAX_CHARACTERS = 10_000  # of the plan, and of all notes together


async def _plan(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    if "text" not in arguments:
        return EnvStep(observation=workspace.plan or "there is no plan yet")
    _check(len(arguments["text"]))
    workspace.plan = arguments["text"]
    return EnvStep(observation="the plan is kept")


async def _note(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    if "text" not in arguments:
        notes = (f"{number}. {note}" for number, note in enumerate(workspace.notes, 1))
        return EnvStep(observation="\n".join(notes) or "there are no notes yet")
    _check(len(arguments["text"]) + sum(map(len, workspace.notes)))
    workspace.notes.append(arguments["text"])
    return EnvStep(observation=f"note {len(workspace.notes)} is kept")


def _check(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise ToolError(f"that is too long: at most {MAX_CHARACTERS} characters are kept")


PLAN = Tool(
    name="plan",
    description="Keeps a plan in place of the one before; without text, shows it.",
    parameters={},
    optional={"text": "the whole plan"},
    handler=_plan,
)
NOTE = Tool(
    name="note",
    description="Keeps a note beside the earlier ones; without text, shows them all.",
    parameters={},
    optional={"text": "the note"},
    handler=_note,
)
