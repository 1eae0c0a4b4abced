"""The real parts of a rollout: sandboxes from a pool, the toolset, patch extraction, grading by hidden tests."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from swe_rl.agents.environment import SweEnvironment
from swe_rl.agents.environments import GAMES
from swe_rl.agents.formats import FORMATS
from swe_rl.agents.prompts import load_prompt
from swe_rl.agents.rendering import Renderer
from swe_rl.agents.toolsets import make_toolset
from swe_rl.agents.toolsets.human import make_human
from swe_rl.config import SandboxConfig, TrainConfig
from swe_rl.errors import SandboxError
from swe_rl.protocols import Sandbox
from swe_rl.rewards import ResultCache, extract_patch, grade, shape_reward
from swe_rl.rollout.games import game_parts
from swe_rl.rollout.runner import RolloutParts
from swe_rl.sandbox import SandboxPool
from swe_rl.sandbox.admission import AGENTS, GRADING
from swe_rl.sandbox.replay import replayed
from swe_rl.tasks import materialize, task_spec
from swe_rl.tasks.environment import prepare_sandbox
from swe_rl.types import Limits, Reward, SandboxSpec, Task


class Pool(Protocol):
    """The part of sandbox.SandboxPool that is used here."""

    counts: Counter[str]

    def lease(self, spec: SandboxSpec, *, lane: str = AGENTS) -> AbstractAsyncContextManager[Sandbox]: ...
    def expect(self, specs: Iterable[SandboxSpec]) -> None: ...
    def snapshot(self) -> Counter[str]: ...


@dataclass(frozen=True, slots=True)
class GradingLane:
    """A pool as grading sees it: its leases wait in a lane of their own, behind no agent, and reach no network."""

    pool: Pool

    def lease(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return self.pool.lease(replace(spec, egress=()), lane=GRADING)


def sandbox_pool(cfg: SandboxConfig, *, run_id: str = "") -> SandboxPool:
    """The manager of this node's sandboxes, as configured. Its owner enters and leaves it."""
    return SandboxPool(
        cfg.concurrency,
        grading=cfg.grading_concurrency,
        memory_bytes=cfg.node_memory_mib << 20,
        warm=cfg.warm,
        daemon_calls=cfg.daemon_calls,
        run_id=run_id,
    )


def rollout_parts(cfg: TrainConfig, *, pool: Pool, renderer: Renderer, trees: str | Path) -> RolloutParts:
    """Parts as configured. `pool` bounds the sandboxes of episodes and grading together; `trees` holds materialised
    tasks. Equal patches of a task are graded once."""
    if cfg.task.source in GAMES:
        return game_parts(cfg, GAMES[cfg.task.source], renderer=renderer)
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
        spec = await _spec(task, cfg.sandbox, trees)
        async with replayed(pool, spec, retries=cfg.sandbox.infra_retries) as sandbox:
            await prepare_sandbox(sandbox, task)
            yield sandbox

    async def expect(tasks: Sequence[Task], copies: int) -> None:
        if cfg.sandbox.warm:
            specs = [await _spec(task, cfg.sandbox, trees) for task in tasks]
            pool.expect(spec for spec in specs for _ in range(copies))

    async def patch_of(sandbox: Sandbox, task: Task) -> bytes:
        return await extract_patch(
            sandbox,
            workdir=task.workdir,
            max_bytes=cfg.reward.max_patch_bytes,
            base_commit=task.base_commit if task.tree else "",  # of an image: the one commit that there is
            base_tree=task.tree,
        )

    reward, cache = cfg.reward, ResultCache()

    async def score(task: Task, patch: bytes) -> Reward:
        return await grade(
            task,
            patch,
            spec=await _spec(task, cfg.sandbox, trees),
            timeout_s=reward.grade_s,
            retries=reward.grade_retries,
            pool=GradingLane(pool),
            cache=cache,
            strong=reward.strong,
            rerun=reward.rerun,
        )

    return RolloutParts(
        open_sandbox=open_sandbox,
        make_environment=environment,
        extract_patch=patch_of,
        grade=score,
        renderer=renderer,
        action_format=action_format,
        limits=cfg.agent,
        infra_retries=cfg.sandbox.infra_retries,
        shape=partial(shape_reward, cfg=reward),
        expect=expect,
        sandbox_counts=pool.snapshot,
    )


async def no_patch(sandbox: Sandbox, task: Task) -> bytes:
    """In place of extract_patch: what a demonstration changed is of no use to anybody."""
    return b""


async def ungraded(task: Task, patch: bytes) -> Reward:
    """In place of grade: demonstrations are imitated whatever they achieve, grading them would only cost time."""
    return Reward(value=math.nan)


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
        runtime=cfg.runtime,
        egress=tuple(cfg.egress),
        limits=limits,
        isolation=cfg.isolation,  # type: ignore[arg-type]
    )
    in_image = bool(task.image) and not task.tree
    return task_spec(task, base, tree=None if in_image else materialize(task, trees))


async def _spec(task: Task, cfg: SandboxConfig, trees: str | Path) -> SandboxSpec:
    try:
        return await asyncio.to_thread(partial(sandbox_spec, task, cfg, trees=trees))
    except OSError as err:  # disk full and the like: the machine's failure
        raise SandboxError(f"the tree of task {task.task_id} could not be written: {err}") from err
