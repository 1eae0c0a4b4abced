"""A run with batching=tree computes fewer tokens than its rollouts have, and its report says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swe_rl.batching import to_samples
from swe_rl.metrics import read_metrics
from swe_rl.rollout.journal import read_parquet

DEMONSTRATIONS = "{name: warm_start, data: demonstrations, num_tasks: 8, samples_per_task: 1, batch_size: 4}"
OVERRIDES = ["experiment=smoke", "threads=1", "eval={splits: {heldout: 2}, base_tasks: 2, greedy_tasks: 0}"]
OVERRIDES += [f"phases=[{DEMONSTRATIONS},{{name: rl, data: rollouts, steps: 2, tasks_per_step: 2}}]"]


def swe_rl(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "swe_rl", *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_group_members_share_their_prompt(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    swe_rl("train", f"run_dir={directory}", *OVERRIDES, "batching=tree", "algo.entropy_coeff=0.01")
    steps = [record.values for record in read_metrics(directory / "metrics.jsonl") if record.phase == "rl"]
    trained = [t for path in sorted(directory.rglob("*.parquet")) for t in read_parquet(path)]
    groups = [[t for t in trained if t.group_id.startswith(f"rl/{step}/")] for step in range(2)]
    assert len(steps) == 2
    for values, group in zip(steps, groups, strict=True):
        samples = sum(len(sample.input_ids) for t in group for sample in to_samples(t, 1.0))
        assert values["train/num_tokens"] < 0.99 * samples
        assert values["train/tree_token_ratio"] * values["train/num_tokens"] == pytest.approx(samples)
        assert values["train/logprob_abs_diff"] <= 1e-4, "trees give the engine's logprobs"
    swe_rl("report", str(directory))
    assert "tokens of the samples / tokens computed (trees)" in (directory / "report.html").read_text()
