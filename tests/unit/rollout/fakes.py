"""Rollout parts over fakes: the sandbox holds the task's tree, the patch is the changed file, the grade looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from swe_rl.agents import FORMATS, ChatRenderer, SweEnvironment, load_prompt
from swe_rl.config import AgentConfig
from swe_rl.protocols import Sandbox
from swe_rl.rollout import Collector, Journal, RolloutParts
from swe_rl.testing import ByteTokenizer, FakeSandbox, ScriptedPolicy, exec_result
from swe_rl.types import Reward, Task

XML = FORMATS["xml"]
FIX = XML.render("replace", {"path": "calc.py", "old": "a - b", "new": "a + b"})
LOOK = XML.render("bash", {"command": "ls"})
SUBMIT = XML.render("submit", {})


@dataclass
class World:
    """Counts what is open and lets tests inject failures: an exception per n-th opened sandbox, or per n-th grade."""

    open_failures: dict[int, Exception] = field(default_factory=dict)
    grade_failures: dict[int, Exception] = field(default_factory=dict)
    commands: dict[str, Any] = field(default_factory=lambda: {"ls": exec_result("calc.py")})
    extract: Callable[[Sandbox], bytes] | None = None
    opened: int = 0
    graded: int = 0
    alive: int = 0
    peak: int = 0

    @asynccontextmanager
    async def open_sandbox(self, task: Task) -> AsyncIterator[FakeSandbox]:
        number = self.opened
        self.opened += 1
        if number in self.open_failures:
            raise self.open_failures[number]
        self.alive += 1
        self.peak = max(self.peak, self.alive)
        try:
            files = {f"{task.workdir}/{path}": data for path, data in task.tree.items()}
            yield FakeSandbox(files, commands=self.commands)
        finally:
            try:
                await asyncio.sleep(0)
            finally:  # also when cancelled while closing
                self.alive -= 1

    async def extract_patch(self, sandbox: Sandbox, task: Task) -> bytes:
        if self.extract is not None:
            return self.extract(sandbox)
        now = await sandbox.read_file(f"{task.workdir}/calc.py")
        return b"" if now == task.tree["calc.py"] else now

    async def grade(self, task: Task, patch: bytes) -> Reward:
        number = self.graded
        self.graded += 1
        if number in self.grade_failures:
            raise self.grade_failures[number]
        return Reward(value=float(b"a + b" in patch), tests_passed=1 + (b"a + b" in patch), tests_total=2)


def make_parts(world: World, *, infra_retries: int = 2, **limits: Any) -> RolloutParts:
    return RolloutParts(
        open_sandbox=world.open_sandbox,
        make_environment=lambda sandbox: SweEnvironment(sandbox, prompt=load_prompt("nano"), action_format=XML),
        extract_patch=world.extract_patch,
        grade=world.grade,
        renderer=ChatRenderer(ByteTokenizer()),
        action_format=XML,
        limits=AgentConfig(**{"max_context_tokens": 4096, "max_turn_tokens": 400, **limits}),
        infra_retries=infra_retries,
    )


def make_collector(
    world: World,
    script: Any,
    *,
    journal: Journal | None = None,
    concurrency: int = 4,
    delay_s: float = 0.0,
    infra_retries: int = 2,
    **limits: Any,
) -> tuple[Collector, ScriptedPolicy]:
    policy = ScriptedPolicy(script, delay_s=delay_s)
    parts = make_parts(world, infra_retries=infra_retries, **limits)
    return Collector(policy, parts=parts, concurrency=concurrency, seed=7, journal=journal), policy


class Handle:
    """`handle.method.remote(...)` as an actor's, run on this event loop."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self._actor, name)

        class Method:
            @staticmethod
            def remote(*arguments: Any) -> asyncio.Future[Any]:
                return asyncio.ensure_future(method(*arguments))

        return Method
