"""Hidden tests in containers: the repair is worth 1, doing nothing is worth 0, a missing Python is nobody's 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import sandbox_backends
from sandbox_backends import IMAGE

from swe_rl.rewards import extract_patch, grade
from swe_rl.sandbox import open_sandbox
from swe_rl.tasks import load_tasks, materialize, task_spec
from swe_rl.types import SandboxSpec, Task


@pytest.fixture
def task() -> Task:
    return load_tasks("minirepo", split="train", num_tasks=1, seed=0)[0]


@pytest.fixture
def spec(task: Task, tmp_path: Path) -> SandboxSpec:
    sandbox_backends.require_mode("docker")
    base = SandboxSpec(backend="docker", image=IMAGE)
    return task_spec(task, base, tree=materialize(task, tmp_path))


async def test_gold_is_one_and_nothing_is_zero(task: Task, spec: SandboxSpec) -> None:
    reward = await grade(task, task.gold_patch, spec=spec)
    assert (reward.value, reward.tests_passed) == (1.0, reward.tests_total)
    path = next(name for name in task.tree if name.endswith(".py"))
    async with open_sandbox(spec) as sandbox:
        await sandbox.exec(f"echo '# nothing' >> {path}")
        patch = await extract_patch(sandbox, workdir=task.workdir, base_commit=task.base_commit, base_tree=task.tree)
    assert b"+# nothing" in patch
    assert (await grade(task, patch, spec=spec)).value == 0.0
