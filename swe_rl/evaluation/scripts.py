"""Two policies without a model that bound every benchmark: the oracle plays the known answer (100 % or the task is
broken), the empty one changes nothing (0 % or the tests are)."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat

from swe_rl.agents.environments import GAMES
from swe_rl.rollout.demonstrations import Demonstrator
from swe_rl.tasks.oracle_calls import run_call, submit_call
from swe_rl.types import Task, ToolCall

_CHUNK = 60_000  # characters of one command: the kernel takes arguments up to 128 KiB


class ScriptedSessions(Mapping[str, Callable[[], Demonstrator]]):
    """Session (trajectory id: phase/step/task/index) -> script, for any phase and index."""

    def __init__(self, by_task: Mapping[str, Callable[[], Demonstrator]]) -> None:
        self._by_task = by_task

    def __getitem__(self, session: str) -> Callable[[], Demonstrator]:
        return self._by_task[session.split("/", 2)[2].rpartition("/")[0]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_task)

    def __len__(self) -> int:
        return len(self._by_task)


class Script:
    """A demonstrator that sees nothing."""

    def __init__(self, calls: Iterator[ToolCall]) -> None:
        self._calls = calls

    def next_call(self, last_observation: str | None, test_passed: bool | None) -> ToolCall:
        return next(self._calls)


def oracle_demonstrator(task: Task, *, toolset: str) -> Demonstrator:
    """Applies the gold patch, whatever it does to files, by shell commands; plays the best moves of a game."""
    if task.source in GAMES:
        return Script(iter(_moves(task, task.gold_patch.decode().split())))
    text = base64.b64encode(task.gold_patch).decode()
    pieces = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    commands = [f"printf %s {piece} >> /tmp/gold.b64" for piece in pieces]
    commands.append("base64 -d /tmp/gold.b64 > /tmp/gold.patch; rm /tmp/gold.b64; git apply /tmp/gold.patch")
    calls = [run_call(toolset, command) for command in commands]
    return Script(iter([*calls, submit_call(toolset)]))


def empty_demonstrator(task: Task, *, toolset: str) -> Demonstrator:
    """Submits at once; in a game, makes no move that counts until the turns are used up."""
    if task.source in GAMES:
        return Script(chain.from_iterable(repeat(_moves(task, ["nothing"]))))
    return Script(iter([submit_call(toolset)]))


def _moves(task: Task, words: list[str]) -> list[ToolCall]:
    name, (parameter,) = next(iter(GAMES[task.source].signatures.items()))
    return [ToolCall(name=name, arguments={parameter: word}) for word in words]
