"""The `ask_human` tool: who answers, and what a question costs."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import threading
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
        self._lines: asyncio.Queue[str] | None = None  # "" is the end of the input

    async def answer(self, task: Task, question: str) -> str:
        """The next line from standard input; NO_ANSWER for an empty one and after the end of the input."""
        async with self._turn:
            lines = self._lines = self._lines or _start_reading()
            while sys.stdin.isatty() and not lines.empty():
                lines.get_nowait()  # typed for a question that has been given up since
            sys.stderr.write(f"\n{task.task_id} asks: {question}\nanswer: ")
            sys.stderr.flush()
            line = await lines.get()
            if not line:
                lines.put_nowait(line)  # the end stays the end
            return line.strip() or NO_ANSWER


def _start_reading() -> asyncio.Queue[str]:
    """Lines of standard input as they come. By a daemon thread: an unanswered question must not hold up the end of the
    process."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str]()

    def read() -> None:
        for line in itertools.chain(sys.stdin, [""]):
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(lines.put_nowait, line)

    threading.Thread(target=read, daemon=True).start()
    return lines


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
