"""One episode's tools over a real sandbox: `tools.call("open", file="a.py")` gives the observation."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from real_parts import require

from swe_rl.agents.toolset import Human, Toolset, Workspace
from swe_rl.agents.toolsets import TOOLSETS
from swe_rl.errors import SandboxUnavailable
from swe_rl.protocols import EnvStep
from swe_rl.sandbox import open_sandbox
from swe_rl.testing import make_task
from swe_rl.types import SandboxSpec, Task, ToolCall

TASK = make_task()
IMAGE = os.environ.get("SWE_RL_BASE_IMAGE", "swe-rl-base")  # made by .ci/docker-engine
backend: Literal["local", "docker"] = "local"  # of open_tools; a fixture sets it, see conftest.py
ON_BOTH_BACKENDS = [  # a module's pytestmark
    pytest.mark.parametrize("backend", ["local", "docker"], indirect=True),
    pytest.mark.usefixtures("backend"),
]


@dataclass
class Tools:
    toolset: Toolset
    workspace: Workspace

    async def step(self, name: str, /, **arguments: str) -> EnvStep:
        return await self.toolset.call(ToolCall(name=name, arguments=arguments), workspace=self.workspace)

    async def call(self, name: str, /, **arguments: str) -> str:
        return (await self.step(name, **arguments)).observation

    async def read(self, path: str) -> bytes:
        return await self.workspace.sandbox.read_file(f"/testbed/{path}")


@asynccontextmanager
async def open_tools(
    toolset: str | Toolset,
    files: Mapping[str, bytes] | None = None,
    *,
    task: Task = TASK,
    human: Human | None = None,
    command_s: float = 20.0,
) -> AsyncIterator[Tools]:
    """Tools over a sandbox with `files` (path in the repository -> content), by default the task's tree."""
    chosen = TOOLSETS[toolset] if isinstance(toolset, str) else toolset
    spec = SandboxSpec(workdir=task.workdir, backend=backend, image=IMAGE if backend == "docker" else "")
    spec = replace(spec, limits=replace(spec.limits, command_s=command_s))
    async with AsyncExitStack() as stack:
        try:
            sandbox = await stack.enter_async_context(open_sandbox(spec))
        except SandboxUnavailable as err:
            require(False, f"a machine that allows {backend} sandboxes ({err})")
            raise
        for path, data in (task.tree if files is None else files).items():
            await sandbox.write_file(f"/testbed/{path}", data)
        yield Tools(chosen, Workspace(sandbox=sandbox, task=task, human=human))
