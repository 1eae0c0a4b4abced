"""The bundled tasks in an imported image: graded as on the base root, and the smoke experiment runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_parts import require

from swe_rl.config.sandbox import SandboxConfig
from swe_rl.errors import ConfigError, ImageError
from swe_rl.rewards import grade
from swe_rl.rollout.wiring import sandbox_spec
from swe_rl.sandbox.oci import default_store
from swe_rl.sandbox.oci.sources import open_source
from swe_rl.tasks import load_tasks

IMAGE = os.environ.get("SWE_RL_BASE_IMAGE", "swe-rl-base")  # with python3 and git; made by .ci/docker-engine


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWE_RL_CACHE", str(folder))
        try:
            with open_source(f"docker-daemon:{IMAGE}") as images:
                default_store().add(images[0], ("base:1",))
        except (ConfigError, ImageError) as err:
            require(False, f"an image with Python in a Docker Engine ({err})")
    return folder


async def test_hidden_tests_judge_as_everywhere(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWE_RL_CACHE", str(cache))
    cfg = SandboxConfig(image="base:1")
    for task in load_tasks("minirepo", split="train", num_tasks=3, seed=1):
        spec = sandbox_spec(task, cfg, trees=tmp_path)
        assert (await grade(task, task.gold_patch, spec=spec)).value == 1.0
        assert (await grade(task, b"", spec=spec)).value == 0.0


@pytest.mark.slow
def test_smoke_experiment_runs_in_an_image(cache: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swe_rl", "train", "experiment=smoke", "sandbox.image=base:1"]
    done = subprocess.run(
        [*command, f"run_dir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        timeout=560,
        env={**os.environ, "SWE_RL_CACHE": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    assert "run directory:" in done.stdout + done.stderr
