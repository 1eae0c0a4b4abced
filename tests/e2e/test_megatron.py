"""The whole loop with trainer=megatron under torchrun: a run, a killed rank, and a resume in another layout."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real_parts import require

from swe_rl.metrics import read_metrics
from swe_rl.training import checkpoint

DEMONSTRATIONS = "{name: warm_start, data: demonstrations, num_tasks: 8, samples_per_task: 1, batch_size: 4}"
TINY = [
    *("experiment=smoke", "threads=1", "algo.entropy_coeff=0.01", "checkpoint_every=1", "keep_checkpoints=9"),
    "eval={splits: {heldout: 2}, base_tasks: 2, greedy_tasks: 0}",
    f"phases=[{DEMONSTRATIONS},{{name: rl, data: rollouts, steps: 3, tasks_per_step: 2}}]",
]
MEGATRON = [*TINY, "trainer=megatron", "trainer.tensor_parallel=2"]


def torchrun(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    arguments = [*launcher, "-m", "swe_rl", "train", f"run_dir={run_dir}", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(run_dir.with_suffix(".log"), "a") as out:
        return subprocess.Popen(arguments, stdout=out, stderr=out, text=True, env=env, start_new_session=True)


def finish(process: subprocess.Popen[str], run_dir: Path) -> None:
    assert process.wait(timeout=900) == 0, run_dir.with_suffix(".log").read_text()[-6000:]


def losses(run_dir: Path, phase: str) -> dict[int, float]:
    records = read_metrics(run_dir / "metrics.jsonl")
    return {r.step: r.values["train/loss"] for r in records if r.phase == phase and "train/loss" in r.values}


def rank_process(launcher: int, rank: int) -> int:
    """The pid of one rank below torchrun."""
    for path in Path(f"/proc/{launcher}/task").glob("*/children"):
        for child in path.read_text().split():
            if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{child}/environ").read_text():
                return int(child)
    raise AssertionError(f"rank {rank} is not below {launcher}")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    require(importlib.util.find_spec("megatron") is not None, "package megatron-core (pip install 'swe-rl[megatron]')")
    return tmp_path / "run"


@pytest.mark.nightly
def test_a_run_learns_what_the_torch_trainer_learns(run_dir: Path, tmp_path: Path) -> None:
    """Supervised losses of the same demonstrations agree step by step."""
    finish(torchrun(run_dir, *MEGATRON), run_dir)
    rows = json.loads((run_dir / "results.json").read_text())
    assert [row["phase"] for row in rows if row["mode"] == "sampled"] == ["base", "warm_start", "rl"]
    other = tmp_path / "torch"
    finish(torchrun(other, *TINY), other)
    found, wanted = losses(run_dir, "warm_start"), losses(other, "warm_start")
    assert found.keys() == wanted.keys()
    assert len(found) >= 2
    for step, loss in wanted.items():
        assert found[step] == pytest.approx(loss, rel=1e-4)
    assert len(losses(run_dir, "rl")) == 3


@pytest.mark.nightly
def test_a_killed_rank_ends_the_job_and_the_run_goes_on_in_another_layout(run_dir: Path) -> None:
    process = torchrun(run_dir, *MEGATRON)
    deadline = time.monotonic() + 600
    while not (run_dir / "checkpoints").is_dir() or checkpoint.latest(run_dir) is None:
        assert process.poll() is None, run_dir.with_suffix(".log").read_text()[-6000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(rank_process(process.pid, 1), signal.SIGKILL)
    assert process.wait(timeout=60) != 0
    said = run_dir.with_suffix(".log").read_text()
    assert "rank      : 1 (local_rank: 1)" in said
    assert "Signal 9 (SIGKILL)" in said
    finish(torchrun(run_dir, *MEGATRON, "trainer.tensor_parallel=1", "resume=true"), run_dir)
    assert len(losses(run_dir, "rl")) == 3
