"""`swe-rl rft` from end to end: a policy that knows two tasks by heart samples them, and imitates what passed."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from swe_rl.cli.dispatch import main
from swe_rl.metrics import read_metrics
from swe_rl.training import checkpoint

SMALL = ["model.hidden_size=96", "model.num_layers=2", "model.intermediate_size=192", "model.vocab_size=1024"]
SMALL += ["threads=1", "task.num_train=2", "engine.num_slots=8", "seed=0", "checkpoint_every=500"]
SMALL += ["agent.max_turns=8", "agent.max_turn_tokens=160", "agent.max_context_tokens=640"]
SMALL += ["agent.max_observation_tokens=160"]
BY_HEART = (
    "{name: warm_start, data: demonstrations, num_tasks: 2, samples_per_task: 1, epochs: 100, batch_size: 2, "
    "evaluate: false, overrides: {trainer: {optimizer: muon, learning_rate: 3.0e-3}, algo: {aggregation: token_mean}}}"
)
RFT = (
    "{name: rft, data: passed_rollouts, num_tasks: 2, samples_per_task: 4, rounds: 2, dedupe: sampled, "
    "max_per_task: 2, epochs: 2, batch_size: 2, overrides: {algo: {aggregation: token_mean}, "
    "trainer: {learning_rate: 1.0e-4, schedule: cosine, min_lr_ratio: 0.0}}}"
)
EVAL = "eval={splits: {heldout: 2}, greedy_tasks: 0, base_tasks: 2}"


def swe_rl(command: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "swe_rl", command, *SMALL, *overrides]
    return subprocess.run(words, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_passing_rollouts_are_imitated_round_by_round(tmp_path: Path) -> None:
    first, run_dir = tmp_path / "warm", tmp_path / "rft"
    words = ["experiment=smoke", f"phases=[{BY_HEART}]", "eval.base_tasks=0", f"run_dir={first}"]
    made = swe_rl("train", *words)
    assert made.returncode == 0, made.stderr[-3000:]
    start = first / "phases" / "warm_start"
    words = ["experiment=smoke", f"phases=[{RFT}]", EVAL, f"init_weights={start}", f"run_dir={run_dir}"]
    tuned = swe_rl("rft", *words)
    assert tuned.returncode == 0, tuned.stderr[-3000:]
    rows = json.loads((run_dir / "results.json").read_text())
    assert [row["phase"] for row in rows] == ["base", "rft-1", "rft-2"]  # before, and after each round
    records = read_metrics(run_dir / "metrics.jsonl")
    for name in ("rft-1", "rft-2"):
        (chosen,) = [r.values for r in records if r.phase == name and "rft/num_kept" in r.values]
        assert chosen["rollout/num_trajectories"] == 8
        assert 0 < chosen["rft/num_kept"] <= 4
        assert chosen["rft/num_duplicates"] > 0, "known by heart, so the same ids come up again"
        steps = [r.values for r in records if r.phase == name and "train/loss" in r.values]
        assert len(steps) == 2 * -(-int(chosen["rft/num_kept"]) // 2)
    weights = [checkpoint.load_weights(path) for path in (start, *(run_dir / "phases" / n for n in ("rft-1", "rft-2")))]
    for before, after in pairwise(weights):
        assert any(not after[key].equal(value) for key, value in before.items())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "init_weights is empty and model.name=nano knows nothing"),
        (["experiment=quickstart"], "phases.rl.data=rollouts is reinforcement learning: use swe-rl train"),
        (["phases=[{name: a, data: demonstrations}]"], "phases: none has data=passed_rollouts"),
    ],
)
def test_what_is_no_rejection_fine_tuning_is_refused(
    overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rft", *overrides]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]
