"""One short run whose phases are different algorithms: each path through trainer, credit and rollouts, for real."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from swe_rl.metric_table import metric_of

PHASES: dict[str, dict[str, Any]] = {
    "gae": {"algo": {"advantage": "gae", "aggregation": "token_mean"}},
    "gspo": {"algo": {"ratio_rule": "gspo", "aggregation": "seq_mean", "epochs": 2}},
    "kl_in_reward": {"algo": {"kl_coeff": 0.1, "kl_in": "reward", "advantage": "group_std"}},
    "kl_in_loss": {
        "algo": {
            "kl_coeff": 0.1,
            "kl_estimator": "k2",
            "correction": "geometric_mask",
            "correction_low": 0.99,
            "correction_cap": 1.01,
        }
    },
    "dynamic": {
        "algo": {"drop_uniform_groups": True, "refill_rounds": 1, "length_penalty": "turns", "length_penalty_end": 5},
        "rollout": {"spare_rollouts": 2},
    },
    "deepswe_v01": {
        "algo": {"stop_preset": "deepswe_v01", "run_tests_on_filtered": False, "advantage": "turn_level"},
        "agent": {"max_turns": 1},
    },
    "reinforce_pp": {"algo": {"advantage": "reinforce_pp", "correction": "mask", "old_policy": "recompute"}},
}


def phases() -> str:
    made = [
        {"name": name, "data": "rollouts", "steps": 1, "tasks_per_step": 2, "evaluate": False, "overrides": overrides}
        for name, overrides in PHASES.items()
    ]
    made[0] |= {"steps": 2, "minibatch_size": 4}
    made[3] |= {"minibatch_size": 4}
    return yaml.safe_dump(made, default_flow_style=True, width=10_000).strip().replace("'", "")


def train(run_dir: Path, *overrides: str, ranks: int = 1) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "swe_rl", "train", "experiment=smoke", f"run_dir={run_dir}"]
    command += ["eval.base_tasks=0", "eval.splits={}", f"phases={phases()}", *overrides]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


def steps_of(run_dir: Path) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["phase"], []).append(record["values"])
    return found


@pytest.mark.slow
def test_every_algorithm_runs(tmp_path: Path) -> None:
    train(tmp_path / "run")
    found = steps_of(tmp_path / "run")
    assert list(found) == list(PHASES)
    for name, steps in found.items():
        assert all(metric_of(metric) is not None for values in steps for metric in values), name
        assert all(v is None or math.isfinite(v) for values in steps for v in values.values()), name
    assert [values["train/optimizer_steps"] for values in found["gae"]] == [2, 2]
    assert found["gspo"][0]["train/optimizer_steps"] == 2
    assert "train/value_error" in found["gae"][0]
    assert "train/kl_ref" in found["kl_in_loss"][0]
    assert found["kl_in_reward"][0]["train/num_loss_tokens"] > 0
    assert found["dynamic"][0]["rollout/refill_rounds"] <= 1
    assert found["deepswe_v01"][0]["rollout/untested"] == found["deepswe_v01"][0]["rollout/masked"] > 0


@pytest.mark.slow
def test_two_ranks_train_like_one(tmp_path: Path) -> None:
    """The same rollouts (of the embedded engine, whatever shares a rank) and gradients: the same metrics, nearly."""
    found = []
    for ranks in (1, 2):
        train(tmp_path / str(ranks), ranks=ranks)
        found.append(steps_of(tmp_path / str(ranks)))
    for name in ("gae", "gspo", "kl_in_reward", "kl_in_loss", "reinforce_pp"):
        for one, two in zip(*(steps[name] for steps in found), strict=True):
            for metric in ("rollout/num_tokens_mean", "train/num_loss_tokens", "train/entropy", "train/grad_norm"):
                assert two[metric] == pytest.approx(one[metric], rel=1e-3, abs=1e-6), (name, metric)
