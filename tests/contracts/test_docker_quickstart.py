"""The quickstart with sandbox=docker: every phase, every sandbox a container, nothing left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sandbox_backends
from pyarrow import parquet
from sandbox_backends import IMAGE

from swe_rl.sandbox.docker import Engine
from swe_rl.sandbox.docker.labels import OWNER_LABEL


@pytest.mark.slow
def test_quickstart_runs_in_containers(tmp_path: Path) -> None:
    sandbox_backends.require_mode("docker")
    words = ["experiment=quickstart_smoke", "sandbox=docker", f"sandbox.image={IMAGE}", f"run_dir={tmp_path / 'run'}"]
    with subprocess.Popen(
        [sys.executable, "-m", "swe_rl", "train", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-3000:]
    files = (tmp_path / "run" / "rollouts").glob("*.parquet")
    reasons = {reason for path in files for reason in parquet.read_table(path).column("stop_reason").to_pylist()}
    assert reasons
    assert "infra_error" not in reasons
    mine = f"{process.pid}-"
    left = [found for found in Engine.shared().containers(OWNER_LABEL) if found["Labels"][OWNER_LABEL].startswith(mine)]
    assert left == []
