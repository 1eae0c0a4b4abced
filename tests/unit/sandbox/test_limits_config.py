"""The key sandbox.cpus reaches the sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_parts import require

from swe_rl.cli.dispatch import main
from swe_rl.config.sandbox import SandboxConfig
from swe_rl.rollout.wiring import sandbox_spec
from swe_rl.sandbox import base_root, cgroup
from swe_rl.tasks import load_tasks
from swe_rl.types import Limits, SandboxSpec


def test_key_becomes_the_limit(tmp_path: Path) -> None:
    task = load_tasks("minirepo", split="train", num_tasks=1, seed=0)[0]
    assert sandbox_spec(task, SandboxConfig(cpus=0.5), trees=tmp_path).limits.cpus == 0.5
    assert sandbox_spec(task, SandboxConfig(), trees=tmp_path).limits.cpus == 0.0


def test_local_set_up_carries_it() -> None:
    group = cgroup.new_group()
    require(group is not None and cgroup.cpu_parent() is not None, "a writable cpu cgroup")
    with_bound = base_root.setup_body(SandboxSpec(limits=Limits(cpus=0.5)), cgroup=group)
    without = base_root.setup_body(SandboxSpec(), cgroup=group)
    assert b" 50000" in with_bound
    assert b" 50000" not in without


def test_negative_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "experiment=smoke", "sandbox.cpus=-1"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "sandbox.cpus" in captured.err
