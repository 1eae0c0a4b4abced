"""The `ask_human` tool: who answers, and what a question costs."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from dataclasses import replace

from swe_rl.agents.observation import ToolError
from swe_rl.agents.toolset import Human, Tool, Workspace
from swe_rl.protocols import EnvStep
from swe_rl.types import Reward, Task, Trajectory

NO_ANSWER = "I do not know."


class ScriptedHuman:
    """Answers from `task.meta["answers"]`: pairs (regular expression, answer), the first that is found in the
    question."""

    async def answer(self, task: Task, question: str) -> str:
        """The scripted answer, or NO_ANSWER."""
        for pattern, answer in task.meta.get("answers", ()):
            if re.search(pattern, question, re.IGNORECASE):
                return str(answer)
        return NO_ANSWER


class TerminalHuman:
    """Asks whoever sits at the terminal; one question at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def answer(self, task: Task, question: str) -> str:
        """One line from standard input; NO_ANSWER for an empty one."""
        async with self._turn:
            line = await asyncio.to_thread(_ask, f"\n{task.task_id} asks: {question}\nanswer: ")
        return line.strip() or NO_ANSWER


def _ask(text: str) -> str:
    sys.stderr.write(text)
    sys.stderr.flush()
    return sys.stdin.readline()


HUMANS: dict[str, type[ScriptedHuman] | type[TerminalHuman]] = {"scripted": ScriptedHuman, "terminal": TerminalHuman}


async def _ask_human(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    if workspace.human is None:
        raise ToolError("nobody is there to answer")
    return EnvStep(observation=await workspace.human.answer(workspace.task, arguments["question"]))


ASK_HUMAN = Tool(
    name="ask_human",
    description="Asks a person one question about the task. It costs reward, so ask only what you cannot find out.",
    parameters={"question": "the question"},
    handler=_ask_human,
)


def charge_questions(reward: Reward, trajectory: Trajectory, *, cost: float) -> Reward:
    """`reward` less `cost` for each question that was asked; unchanged when there was none."""
    asked = sum(turn.tool_call is not None and turn.tool_call.name == ASK_HUMAN.name for turn in trajectory.turns)
    if not asked or not cost:
        return reward
    return replace(reward, value=reward.value - cost * asked, terms={**reward.terms, "questions": -cost * asked})


def make_human(kind: str) -> Human | None:
    """The answerer that `agent.ask_human` names; None for `off`."""
    return HUMANS[kind]() if kind != "off" else None
