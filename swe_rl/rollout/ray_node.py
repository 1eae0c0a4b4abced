"""What runs on each node under Ray: one process, an asynchronous actor, with the node's sandboxes and their episodes.

The actor adds nothing to the plain objects of this package: a SandboxPool that it enters once, and a RolloutRunner per
collector of the driver, whose policy is reached through the relay. When the process ends, however it ends, its
sandboxes end with it: a local one by its watch over the owner, others by lease and reaper.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from swe_rl.agents.rendering import Renderer
from swe_rl.config import SandboxConfig, TrainConfig
from swe_rl.errors import SweRlError
from swe_rl.rollout.journal import RolloutKey
from swe_rl.rollout.ray_relay import Failure, RelayedPolicy
from swe_rl.rollout.runner import RolloutRunner
from swe_rl.rollout.wiring import rollout_parts, sandbox_pool
from swe_rl.sandbox import SandboxPool
from swe_rl.types import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSetup:
    """Everything a node needs to make the runner of one collector."""

    channel: str  # of its policy
    cfg: TrainConfig
    renderer: Renderer
    trees: str  # directory for materialised trees, on each node its own
    changes: Mapping[str, Any] = field(default_factory=dict)  # of RolloutParts; importable functions


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A trajectory or why there is none, and what happened on the node since its last reply."""

    trajectory: Trajectory | Failure
    counts: Counter[str]  # of sandbox/stats.py
    retried: int


class RolloutNode:
    """The actor of one node."""

    def __init__(self, sandbox: SandboxConfig, relay: Any, *, run_id: str) -> None:
        self._config, self._relay, self._run_id = sandbox, relay, run_id
        self._pool: SandboxPool | None = None
        self._entering = asyncio.Lock()
        self._runners: dict[str, RolloutRunner] = {}
        self._reported: Counter[str] = Counter()

    async def ready(self) -> tuple[int, Counter[str]]:
        """(process id, what the start found and removed)."""
        pool = await self._entered()
        return os.getpid(), self._news(pool)

    async def play(self, setup: list[Any], channel: str, task: Task, key: RolloutKey, temperature: float) -> Reply:
        """RolloutRunner.play. `setup` is a list of one reference, so that it is only fetched when it is needed."""
        pool = await self._entered()
        runner = await self._runner(pool, setup, channel)
        return await self._reply(pool, runner, runner.play(task, key, temperature=temperature))

    async def grade(self, setup: list[Any], channel: str, task: Task, trajectory: Trajectory) -> Reply:
        """RolloutRunner.grade."""
        pool = await self._entered()
        runner = await self._runner(pool, setup, channel)
        return await self._reply(pool, runner, runner.grade(task, trajectory))

    async def expect(self, setup: list[Any], channel: str, tasks: list[Task], copies: int) -> None:
        """RolloutRunner.expect."""
        runner = await self._runner(await self._entered(), setup, channel)
        await runner.expect(tasks, copies)

    async def close(self) -> Counter[str]:
        """Ends all sandboxes of the node; returns the last counts."""
        pool = await self._entered()
        await pool.close()
        return self._news(pool)

    async def _entered(self) -> SandboxPool:
        async with self._entering:
            if self._pool is None:
                pool = sandbox_pool(self._config, run_id=self._run_id)
                self._pool = await pool.__aenter__()
            return self._pool

    async def _runner(self, pool: SandboxPool, setup: list[Any], channel: str) -> RolloutRunner:
        if channel not in self._runners:
            made: RunnerSetup = await setup[0]
            parts = rollout_parts(made.cfg, pool=pool, renderer=made.renderer, trees=made.trees)
            policy = RelayedPolicy(self._relay, channel)
            self._runners[channel] = RolloutRunner(policy, parts=replace(parts, **made.changes), run_seed=made.cfg.seed)
        return self._runners[channel]

    async def _reply(self, pool: SandboxPool, runner: RolloutRunner, work: Any) -> Reply:
        before = runner.retried
        result: Trajectory | Failure
        try:
            result = await work
        except SweRlError as err:
            result = Failure.of(err)
        return Reply(trajectory=result, counts=self._news(pool), retried=runner.retried - before)

    def _news(self, pool: SandboxPool) -> Counter[str]:
        now = pool.snapshot()
        news = Counter({name: count - self._reported[name] for name, count in now.items()})
        self._reported = now
        return news
