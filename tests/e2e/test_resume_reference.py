"""A phase with a KL penalty that is resumed in its middle compares with the policy at the START of the phase."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swe_rl.training import checkpoint

WARM = "{name: warm, data: demonstrations, num_tasks: 8, samples_per_task: 2, batch_size: 8, evaluate: false}"
SMALL = ["experiment=bandit", "task.num_train=8", "rollout.group_size=4", "engine.num_slots=8", "sandbox.concurrency=8"]
SMALL += ["eval={splits: {}, base_tasks: 0}", "checkpoint_every=1", "keep_checkpoints=20"]
SMALL += ["trainer={learning_rate: 0.002}"]


def train(run_dir: Path, phases: str, *overrides: str) -> None:
    command = [sys.executable, "-m", "swe_rl", "train", f"run_dir={run_dir}", *SMALL, f"phases={phases}", *overrides]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


def at(run_dir: Path, phase: int, step: int) -> Path:
    """The checkpoint after `step` iterations of the phase with this index."""
    for path in sorted((run_dir / "checkpoints").iterdir()):
        counters = checkpoint.load(path).counters
        if (counters["phase"], counters["step"]) == (phase, step):
            return path
    raise AssertionError(f"no checkpoint of phase {phase}, step {step}")


def rolled_back(run_dir: Path, kept: Path, folder: Path, *, phase: str) -> Path:
    """A copy of the run as it was when it was killed after the checkpoint `kept`."""
    copy = Path(shutil.copytree(run_dir, folder))
    for path in (copy / "checkpoints").iterdir():
        if path.name > kept.name:
            shutil.rmtree(path)
    shutil.rmtree(copy / "phases" / phase)
    return copy


def distances(run_dir: Path, phase: str) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["values"]["train/kl_ref"] for record in records if record["phase"] == phase]


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True], ids=["after a phase", "first phase"])
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_resumed_in_the_middle_of_a_phase_with_a_reference(where: str, first: bool, tmp_path: Path) -> None:
    # nothing is masked, and the entropy bonus moves the weights whatever the rewards are
    algo = f"{{algo: {{kl_coeff: 1.0, kl_in: {where}, entropy_coeff: 0.1, stop_preset: keep_all}}}}"
    rl = "{name: rl, data: rollouts, steps: 3, tasks_per_step: 4, minibatch_size: 8, evaluate: false, "
    rl += f"overrides: {algo}}}"
    phases, index = (f"[{rl}]", 0) if first else (f"[{WARM},{rl}]", 1)
    whole = tmp_path / "whole"
    train(whole, phases)
    resumed = rolled_back(whole, at(whole, index, 2), tmp_path / "resumed", phase="rl")
    train(resumed, phases, "resume=true")
    expected, found = (checkpoint.load_weights(d / "phases" / "rl") for d in (whole, resumed))
    assert all(found[name].equal(value) for name, value in expected.items())
    start = checkpoint.load_weights(at(whole, index, 2))
    assert any(not start[name].equal(value) for name, value in expected.items()), "the last step must move something"
    if where == "loss":
        assert distances(resumed, "rl")[-1] == distances(whole, "rl")[-1] > 0
