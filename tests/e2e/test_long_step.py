"""One optimiser step on one long trajectory: benchmarks/long_step.py, short in CI, to 131,072 tokens at night."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LENGTHS = (16384, 32768, 65536, 131072)


def run(*options: str, timeout_s: int) -> list[dict[str, object]]:
    """The rows that the benchmark prints; it must say that all is well."""
    command = [sys.executable, "benchmarks/long_step.py", *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["auto", "cpu"])
def test_a_step_is_that_of_whole_matrices_in_fp64(attention: str) -> None:
    """Loss and gradient norm of 2,048 tokens; longer than a block of any kernel, shorter than a coffee."""
    (row,) = run("--check", "2048", "--attention", attention, timeout_s=300)
    assert 300 < int(str(row["trained"])) < 520  # 20 % of the tokens


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_131072_tokens_fit_into_6_gb_and_memory_is_linear() -> None:
    run("--check", "8192", timeout_s=3600)
    rows = run("--tokens", ",".join(map(str, LENGTHS)), "--threads", "2", timeout_s=3 * 3600)
    assert tuple(row["tokens"] for row in rows) == LENGTHS
    for row in rows:
        assert float(str(row["peak_mib"])) <= 6 * 1024, row
