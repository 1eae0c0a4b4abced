"""The whole loop with trainer=megatron under torchrun: a run, a killed rank, a resume in another layout, and steps on
recorded rollouts. How long a run may take follows from how long its first checkpoint took on this machine.
"""

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
MEGATRON = [*TINY, "trainer=megatron", "trainer.tensor_parallel=2", "async_checkpoints=true"]


def torchrun(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    return launch(run_dir, 2, "-m", "swe_rl", "train", f"run_dir={run_dir}", *words)


def launch(run_dir: Path, processes: int, *words: str) -> subprocess.Popen[str]:
    """Python with these words, in so many ranks; what they say goes to the log beside run_dir."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")])
    with open(run_dir.with_suffix(".log"), "a") as out:
        return subprocess.Popen([*launcher, *words], stdout=out, stderr=out, text=True, env=env, start_new_session=True)


def first_checkpoint(process: subprocess.Popen[str], run_dir: Path) -> float:
    """Seconds until the run has one: libraries are read, an evaluation and a step are done. As long as it works it may
    take what it needs."""
    started = time.monotonic()
    while not (run_dir / "checkpoints").is_dir() or checkpoint.latest(run_dir) is None:
        assert process.poll() is None, run_dir.with_suffix(".log").read_text()[-6000:]
        time.sleep(0.05)
    return time.monotonic() - started


def limit(measured: float) -> float:
    """Seconds that a whole run may take: five steps and three evaluations, each shorter than what was measured."""
    return 60 + 16 * measured


def finish(process: subprocess.Popen[str], run_dir: Path, *, within: float | None = None) -> None:
    """Waits for a run to end well; without `within`, for as long as the test may take."""
    try:
        code = process.wait(timeout=within)
    finally:
        process.terminate()  # does nothing to one that has ended
    assert code == 0, run_dir.with_suffix(".log").read_text()[-6000:]


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
    process = torchrun(run_dir, *MEGATRON)
    measured = first_checkpoint(process, run_dir)
    finish(process, run_dir, within=limit(measured))
    rows = json.loads((run_dir / "results.json").read_text())
    assert [row["phase"] for row in rows if row["mode"] == "sampled"] == ["base", "warm_start", "rl"]
    other = tmp_path / "torch"
    finish(torchrun(other, *TINY), other, within=limit(measured))
    found, wanted = losses(run_dir, "warm_start"), losses(other, "warm_start")
    assert found.keys() == wanted.keys()
    assert len(found) >= 2
    for step, loss in wanted.items():
        assert found[step] == pytest.approx(loss, rel=1e-4)
    assert len(losses(run_dir, "rl")) == 3


@pytest.mark.nightly
def test_a_killed_rank_ends_the_job_and_the_run_goes_on_in_another_layout(run_dir: Path) -> None:
    process = torchrun(run_dir, *MEGATRON)
    measured = first_checkpoint(process, run_dir)
    os.kill(rank_process(process.pid, 1), signal.SIGKILL)
    assert process.wait(timeout=60 + measured) != 0  # torchrun gives the other rank 30 s
    said = run_dir.with_suffix(".log").read_text()
    assert "rank      : 1 (local_rank: 1)" in said
    assert "Signal 9 (SIGKILL)" in said
    finish(torchrun(run_dir, *MEGATRON, "trainer.tensor_parallel=1", "resume=true"), run_dir, within=limit(measured))
    assert len(losses(run_dir, "rl")) == 3


@pytest.mark.nightly
def test_steps_on_recorded_rollouts_are_those_of_one_process(run_dir: Path) -> None:
    """Five steps of the Megatron trainer, tensor and context parallel, against the torch trainer alone."""
    words = [*TINY[:-1], f"phases=[{DEMONSTRATIONS},{{name: rl, data: rollouts, steps: 5, tasks_per_step: 2}}]"]
    recording = [sys.executable, "-m", "swe_rl", "train", f"run_dir={run_dir}", *words]
    subprocess.run(recording, check=True, stdout=subprocess.DEVNULL)
    worker, rows = str(Path(__file__).with_name("recorded_steps_worker.py")), "batching.max_tokens_per_batch=1500"
    found = {}
    for name, processes, trainer in (
        ("torch", 1, ["trainer=adamw"]),
        ("megatron", 4, ["trainer=megatron", "trainer.tensor_parallel=2", "trainer.context_parallel=2"]),
    ):
        out = run_dir.with_name(f"{name}.json")
        finish(launch(run_dir, processes, worker, str(run_dir), str(out), *words, rows, *trainer), run_dir)
        found[name] = json.loads(out.read_text())
    assert len(found["torch"]) == 5
    assert len({loss for loss, _, _ in found["torch"]}) == 5
    for one, four in zip(found["torch"], found["megatron"], strict=True):
        assert four[0] == pytest.approx(one[0], rel=1e-5)
        assert four[1] == pytest.approx(one[1], rel=1e-5)
        assert four[2] == one[2] > 0
