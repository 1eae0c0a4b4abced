"""What a tool is, what it works on, and how a call reaches it. The tools themselves are in agents/toolsets.

A mistake of the policy (unknown tool, missing argument, text not found) is an observation. Trouble of the machine is a
SandboxError and passes through.
"""

from __future__ import annotations

import posixpath
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from swe_rl.agents.observation import ToolError
from swe_rl.protocols import EnvStep, Sandbox
from swe_rl.types import Task, ToolCall

Handler = Callable[["Workspace", Mapping[str, str]], Awaitable[EnvStep]]


class Human(Protocol):
    """Somebody who answers the policy's questions; see toolsets/human.py."""

    async def answer(self, task: Task, question: str) -> str: ...


@dataclass(slots=True)
class OpenFile:
    """A file and the window on it, for windowed toolsets."""

    path: str  # absolute
    first_line: int = 1  # uppermost line shown
    scrolls: int = 0  # in a row


@dataclass(slots=True, kw_only=True)
class Workspace:
    """What the tools of one episode work on and remember. Each toolset uses its part."""

    sandbox: Sandbox
    task: Task
    human: Human | None = None
    cwd: str = ""  # directory that relative paths start at; empty: the repository
    exports: str = ""  # shell code that restores exported variables, where a toolset carries them on
    open_file: OpenFile | None = None
    undo: dict[str, list[bytes | None]] = field(default_factory=dict)  # path -> earlier contents; None: no such file
    plan: str = ""
    notes: list[str] = field(default_factory=list)

    def path(self, path: str) -> str:
        """Absolute path inside the sandbox."""
        return posixpath.normpath(posixpath.join(self.task.workdir, self.cwd, path.strip()))

    def shown(self, path: str) -> str:
        """An absolute path as the policy writes it: relative when it is in the repository."""
        return path.removeprefix(self.task.workdir.rstrip("/") + "/")

    def fork(self, sandbox: Sandbox) -> Workspace:
        """The same memory over a fork of the sandbox; what one of the two does next, the other does not see."""
        return replace(
            self,
            sandbox=sandbox,
            open_file=None if self.open_file is None else replace(self.open_file),
            undo={path: list(contents) for path, contents in self.undo.items()},
            notes=list(self.notes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, str]  # name -> meaning; all are required
    optional: Mapping[str, str] = field(default_factory=dict)  # name -> meaning
    synonyms: Mapping[str, str] = field(default_factory=dict)  # another name that is taken -> name it stands for
    handler: Handler


class Toolset:
    """Calls tools by name; every mistake in the call comes back as text."""

    def __init__(
        self,
        tools: tuple[Tool, ...],
        *,
        synonyms: Mapping[str, str] | None = None,
        footer: Callable[[Workspace], str] | None = None,
        commands: Collection[str] = (),
    ) -> None:
        """`synonyms`: another name of a tool -> its name. `footer` makes the last line of every observation.
        `commands`: tools that the shell tool of this set runs as well, when they are written as commands."""
        self.tools = tools
        self._synonyms = synonyms or {}
        self._by_name = {tool.name: tool for tool in tools}
        self._by_name |= {other: self._by_name[name] for other, name in self._synonyms.items()}
        self._footer = footer
        self._commands = commands

    @property
    def signatures(self) -> dict[str, tuple[str, ...]]:
        """Name -> parameters in order, as an action format is bound to them: without the tools that are commands."""
        return {tool.name: (*tool.parameters, *tool.optional) for tool in self.tools if tool.name not in self._commands}

    def extended(self, *tools: Tool) -> Toolset:
        """The same with more tools."""
        if not tools:
            return self
        all_tools = (*self.tools, *tools)
        return Toolset(all_tools, synonyms=self._synonyms, footer=self._footer, commands=self._commands)

    async def call(self, call: ToolCall, *, workspace: Workspace) -> EnvStep:
        """One tool call. Raises SandboxError for trouble of the machine only."""
        try:
            step = await self._dispatch(call, workspace)
        except ToolError as err:
            step = EnvStep(observation=f"error: {err}")
        except OSError as err:
            step = EnvStep(observation=f"error: {err.strerror or err}")
        if self._footer is None or step.done:
            return step
        return replace(step, observation=f"{step.observation}\n{self._footer(workspace)}".lstrip("\n"))

    async def _dispatch(self, call: ToolCall, workspace: Workspace) -> EnvStep:
        tool = self._by_name.get(call.name)
        if tool is None:
            raise ToolError(f"no tool {call.name}; use {', '.join(tool.name for tool in self.tools)}")
        arguments = {tool.synonyms.get(key, key): value for key, value in call.arguments.items()}
        if missing := [key for key in tool.parameters if key not in arguments]:
            raise ToolError(f"{call.name} needs {', '.join(missing)}")
        if unknown := [key for key in arguments if key not in tool.parameters and key not in tool.optional]:
            raise ToolError(f"{call.name} has no parameter {', '.join(unknown)}")
        for key, value in arguments.items():
            if not _is_text(value):
                raise ToolError(f"{key} holds half a surrogate pair, which is no text")
        return await tool.handler(workspace, arguments)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
