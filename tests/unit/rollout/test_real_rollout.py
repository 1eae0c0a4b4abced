"""Rollouts with the real parts: local sandboxes, generated tasks, patches, hidden tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from real_parts import require

from swe_rl.agents import FORMATS, ChatRenderer
from swe_rl.config import TrainConfig
from swe_rl.errors import SandboxUnavailable
from swe_rl.rollout import Collector
from swe_rl.rollout.wiring import rollout_parts
from swe_rl.sandbox import SandboxPool, open_sandbox
from swe_rl.tasks import load_tasks
from swe_rl.tasks.oracle import oracle_replacements
from swe_rl.testing import ByteTokenizer, ScriptedPolicy
from swe_rl.types import SandboxSpec, StopReason, Task, Trajectory

XML = FORMATS["xml"]
SUBMIT = XML.render("submit", {})


def bash(command: str) -> str:
    return XML.render("bash", {"command": command})


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    asyncio.run(_need_sandboxes())
    return load_tasks("minirepo", split="train", num_tasks=3, seed=0)


async def _need_sandboxes() -> None:
    try:
        async with open_sandbox(SandboxSpec()):
            pass
    except SandboxUnavailable as err:
        require(False, f"a machine that allows sandboxes ({err})")


def collector_of(script: Any, trees: Path, **sandbox: Any) -> Collector:
    cfg = TrainConfig()
    cfg.agent.max_context_tokens, cfg.agent.max_turn_tokens, cfg.agent.max_observation_tokens = 60_000, 8000, 400
    for key, value in sandbox.items():
        setattr(cfg.sandbox, key, value)
    parts = rollout_parts(cfg, pool=SandboxPool(4), renderer=ChatRenderer(ByteTokenizer()), trees=trees)
    return Collector(ScriptedPolicy(script), parts=parts, concurrency=4, seed=0)


async def run(task: Task, script: list[str], trees: Path, **sandbox: Any) -> Trajectory:
    return await collector_of(script, trees, **sandbox).run_one(task, 0, phase="t", step=0)


async def test_oracle_passes_and_the_empty_patch_does_not(tasks: list[Task], tmp_path: Path) -> None:
    scripts = {
        task.task_id: [
            *(XML.render("replace", {"path": e.path, "old": e.old, "new": e.new}) for e in oracle_replacements(task)),
            XML.render("test", {}),
            SUBMIT,
        ]
        for task in tasks
    }

    def script(session: str, turn: int) -> str:
        task_id, index = session.removeprefix("t/0/").rsplit("/", 1)
        return scripts[task_id][turn] if index == "0" else SUBMIT

    collector = collector_of(script, tmp_path)
    async for group in collector.groups(tasks, group_size=2, phase="t", step=0):
        solved, empty = group.trajectories
        assert solved.reward is not None
        assert empty.reward is not None
        assert (solved.reward.value, empty.reward.value) == (1.0, 0.0)
        assert solved.turns[-2].observation.endswith("passed")
        assert "failed" not in solved.turns[-2].observation
        assert empty.patch == b""
    assert collector.stats.lost == 0


@pytest.mark.parametrize(
    ("command", "seen"),
    [
        ("exit 3", "exit 3"),
        ("true", "exit 0"),
        ("cat", "exit 0"),
        ("head -c 64 /dev/urandom; printf '\\377\\200ok'", "ok"),
        ("printf '\\033[31mred\\033[0m\\r\\n'", "red"),
        ("kill -9 1; echo alive", "alive"),
        ("kill -9 $$", "exit 137"),
        ("sleep 1000 & echo started", "started"),
        ("echo 'a<|im_end|>b'", "a<|im_end|>b"),
        ("echo '<unclosed", "exit 2"),
        ("sleep 1000", "timeout: killed after 1 s"),
        ("yes", "tokens cut]"),
        ("ls /root /home/agent/.ssh; cat /etc/shadow", "No such file"),
    ],
)
async def test_hostile_commands_end_in_an_observation(
    tasks: list[Task], tmp_path: Path, command: str, seen: str
) -> None:
    got = await run(tasks[0], [bash(command), SUBMIT], tmp_path, command_s=1.0)
    assert seen in got.turns[0].observation
    assert got.stop_reason is StopReason.SUBMITTED, got.detail
    assert got.reward is not None
    assert got.reward.value == 0.0


async def test_destroying_the_repository_is_scored_not_lost(tasks: list[Task], tmp_path: Path) -> None:
    for command in ("rm -rf / 2>/dev/null; echo done", "rm -rf .git; echo done", "chmod 000 .; echo done"):
        got = await run(tasks[0], [bash(command), SUBMIT], tmp_path)
        assert got.stop_reason is StopReason.SUBMITTED, (command, got.detail)
        assert got.reward is not None
        assert got.reward.value == 0.0


async def test_edit_tools_keep_bytes(tasks: list[Task], tmp_path: Path) -> None:
    script = [
        bash("printf 'def f():\\r\\n\\treturn 1' > odd.py"),
        XML.render("edit_function", {"path": "odd.py", "name": "f", "body": "def f():\n    return 2"}),
        XML.render("replace", {"path": "odd.py", "old": "2", "new": "'é'"}),
        XML.render("replace", {"path": ".", "old": "2", "new": "3"}),
        XML.render("replace", {"path": "/usr/bin/env", "old": "2", "new": "3"}),
        bash("od -c odd.py"),
        SUBMIT,
    ]
    got = await run(tasks[0], script, tmp_path)
    seen = [turn.observation for turn in got.turns]
    assert seen[1:3] == ["ok", "ok"]
    assert seen[3] == "error: Is a directory"
    assert seen[4].startswith("error: ")
    assert seen[5].split("\n")[1].endswith("' 303 251   '")
    assert "\\r  \\n" in seen[5]
    assert got.patch is not None
    assert b"return '\xc3\xa9'" in got.patch
