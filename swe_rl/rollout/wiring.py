"""The real parts of a rollout: sandboxes from a pool, the toolset, patch extraction, grading by hidden tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from swe_rl.agents.environment import SweEnvironment
from swe_rl.agents.formats import FORMATS
from swe_rl.agents.prompts import load_prompt
from swe_rl.agents.rendering import Renderer
from swe_rl.agents.toolsets import make_toolset
from swe_rl.agents.toolsets.human import make_human
from swe_rl.config import SandboxConfig, TrainConfig
from swe_rl.errors import SandboxError
from swe_rl.protocols import Sandbox
from swe_rl.rewards import ResultCache, extract_patch, grade
from swe_rl.rollout.runner import RolloutParts
from swe_rl.tasks import materialize, task_spec
from swe_rl.types import Limits, Reward, SandboxSpec, Task


class Pool(Protocol):
    """The part of sandbox.SandboxPool that is used here."""

    def lease(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]: ...


def rollout_parts(cfg: TrainConfig, *, pool: Pool, renderer: Renderer, trees: str | Path) -> RolloutParts:
    """Parts as configured. `pool` bounds the sandboxes of episodes and grading together; `trees` holds materialised
    tasks. Equal patches of a task are graded once."""
    toolset = make_toolset(cfg.agent)
    action_format = FORMATS[cfg.agent.action_format].bind(toolset.signatures)
    environment = partial(
        SweEnvironment,
        prompt=load_prompt(cfg.agent.prompt),
        action_format=action_format,
        toolset=toolset,
        human=make_human(cfg.agent.ask_human),
    )

    @asynccontextmanager
    async def open_sandbox(task: Task) -> AsyncIterator[Sandbox]:
        async with pool.lease(await _spec(task, cfg.sandbox, trees)) as sandbox:
            yield sandbox

    async def patch_of(sandbox: Sandbox, task: Task) -> bytes:
        return await extract_patch(
            sandbox,
            workdir=task.workdir,
            max_bytes=cfg.reward.max_patch_bytes,
            base_commit=task.base_commit,
            base_tree=task.tree,
        )

    limit_s, retries, cache = cfg.reward.grade_s, cfg.reward.grade_retries, ResultCache()

    async def score(task: Task, patch: bytes) -> Reward:
        spec = await _spec(task, cfg.sandbox, trees)
        return await grade(task, patch, spec=spec, timeout_s=limit_s, retries=retries, pool=pool, cache=cache)

    return RolloutParts(
        open_sandbox=open_sandbox,
        make_environment=environment,
        extract_patch=patch_of,
        grade=score,
        renderer=renderer,
        action_format=action_format,
        limits=cfg.agent,
        infra_retries=cfg.sandbox.infra_retries,
    )


def sandbox_spec(task: Task, cfg: SandboxConfig, *, trees: str | Path) -> SandboxSpec:
    """Spec of a sandbox with the task's tree under its workdir; writes the tree to `trees` if it is not there yet."""
    limits = Limits(
        command_s=cfg.command_s,
        cpus=cfg.cpus,
        memory_bytes=cfg.memory_mib << 20,
        pids=cfg.pids,
        disk_bytes=cfg.disk_mib << 20,
        output_bytes=cfg.output_kib << 10,
        lease_s=cfg.lease_s,
    )
    base = SandboxSpec(
        backend=cfg.backend,  # type: ignore[arg-type]  # validated with the configuration
        image=cfg.image,
        limits=limits,
        isolation=cfg.isolation,  # type: ignore[arg-type]
    )
    return task_spec(task, base, tree=materialize(task, trees))


async def _spec(task: Task, cfg: SandboxConfig, trees: str | Path) -> SandboxSpec:
    try:
        return await asyncio.to_thread(partial(sandbox_spec, task, cfg, trees=trees))
    except OSError as err:  # disk full and the like: the machine's failure
        raise SandboxError(f"the tree of task {task.task_id} could not be written: {err}") from err
