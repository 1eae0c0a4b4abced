"""The software-engineering environment: one sandbox with the repository, a toolset, and the opening messages."""

from __future__ import annotations

from collections.abc import Mapping

from swe_rl.agents.formats import ActionFormat
from swe_rl.agents.prompts import Prompt
from swe_rl.agents.toolset import Human, Toolset, Workspace
from swe_rl.agents.toolsets import TOOLSETS
from swe_rl.protocols import EnvStep, Sandbox
from swe_rl.types import Task, ToolCall


class SweEnvironment:
    """Implements Environment over one sandbox, which its owner opens and closes."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        prompt: Prompt,
        action_format: ActionFormat,
        toolset: Toolset = TOOLSETS["minimal"],
        human: Human | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._human = human
        self._prompt = prompt
        self._format = action_format
        self._toolset = toolset
        self._workspace: Workspace | None = None

    async def reset(self, task: Task) -> list[Mapping[str, str]]:
        """Opening messages of `task`, whose tree the sandbox already holds."""
        self._workspace = Workspace(sandbox=self._sandbox, task=task, human=self._human)
        return self._prompt.messages(task, tools=self._toolset.tools, action_format=self._format)

    async def step(self, call: ToolCall) -> EnvStep:
        """Runs one call. Mistakes of the policy are observations; raises SandboxError for trouble of the machine."""
        if self._workspace is None:
            raise RuntimeError("step() before reset()")
        return await self._toolset.call(call, workspace=self._workspace)

    def fork(self, sandbox: Sandbox) -> SweEnvironment:
        """The same episode over a fork of its sandbox: what the tools remember is copied."""
        other = SweEnvironment(
            sandbox, prompt=self._prompt, action_format=self._format, toolset=self._toolset, human=self._human
        )
        other._workspace = None if self._workspace is None else self._workspace.fork(sandbox)
        return other
