"""The comparison of recipes: every arm is a valid configuration, budgets are equal, the table says what is certain."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import bench_recipes as bench
from swe_rl.cli.hydra_entry import compose_config
from swe_rl.config import TrainConfig, validate

BUDGET = bench.Budget(
    steps=12, tasks_per_step=12, heldout=16, learning_rate=3e-4, init_weights="w", extra=("threads=1",)
)


def rollouts(cfg: TrainConfig) -> int:
    return sum(
        phase.steps * phase.tasks_per_step * cfg.rollout.group_size
        if phase.data == "rollouts"
        else phase.num_tasks * phase.samples_per_task
        for phase in cfg.phases
    )


@pytest.mark.parametrize("study", bench.STUDIES)
def test_every_arm_is_valid_and_takes_as_many_rollouts(study: str) -> None:
    taken = set()
    for arm in bench.STUDIES[study]:
        cfg = compose_config(TrainConfig, "train", bench.overrides(arm, 3, BUDGET))
        validate(cfg)
        taken.add(rollouts(cfg))
        rl = cfg.phases[-1]
        assert rl.tasks_per_step * cfg.rollout.group_size == bench.OPTIMIZER_STEPS * rl.minibatch_size
        assert (cfg.seed, cfg.init_weights, cfg.eval.splits) == (3, "w", {"heldout": 16})
    assert taken == {12 * 12 * 8}


def test_arms_differ_from_the_first_in_what_their_name_says() -> None:
    first, *others = bench.INGREDIENTS
    reference = compose_config(TrainConfig, "train", bench.overrides(first, 1, BUDGET)).algo
    for arm in others:
        algo = compose_config(TrainConfig, "train", bench.overrides(arm, 1, BUDGET)).algo
        differing = [key for key, value in vars(reference).items() if getattr(algo, key) != value]
        assert len(differing) == 1 or arm.name == "grpo", (arm.name, differing)


def outcome(rate: float, seed: int, *, tasks: int = 400) -> bench.Outcome:
    chance = random.Random(seed)
    end = {f"t{i}": [float(chance.random() < rate)] for i in range(tasks)}
    return bench.Outcome(start={"t0": [0.0], "t1": [1.0]}, end=end, curve=[0.1, 0.2, rate], minutes=2.0)


def test_the_table_is_paired_and_says_what_is_significant(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {
        "grpo_pp": {1: outcome(0.3, 1), 2: outcome(0.3, 2)},
        "better": {1: outcome(0.6, 1), 2: outcome(0.6, 2)},
        "same": {1: outcome(0.3, 1), 2: outcome(0.3, 2)},
        "other_seed": {3: outcome(0.3, 3)},
    }
    rows = {row["arm"]: row for row in bench.table("ingredients", outcomes)}
    assert rows["better"]["verdict"] == "better"
    assert rows["better"]["gain_low"] > 0.2
    assert rows["same"]["verdict"] == "no significant difference"
    assert rows["same"]["gain"] == 0.0
    assert rows["same"]["gain_stderr"] == 0.0  # paired: the same seeds did the same
    assert "gain" not in rows["grpo_pp"]
    assert "gain" not in rows["other_seed"]
    assert rows["grpo_pp"]["start"] == 0.5
    bench.print_table(list(rows.values()))
    assert "no significant difference" in capsys.readouterr().out


def test_a_run_counts_when_it_has_ended(tmp_path: Path) -> None:
    run_dir = tmp_path / "ingredients" / "grpo_pp" / "seed1"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").touch()
    row = {"phase": "base", "split": "heldout", "mode": "sampled", "by_task": {"t": [0.0]}}
    (run_dir / "results.json").write_text(json.dumps([row]))
    assert bench.read_outcome(run_dir) is None
    (run_dir / "results.json").write_text(json.dumps([row, {**row, "phase": "rl", "by_task": {"t": [1.0]}}]))
    record = {"phase": "rl", "step": 1, "time_s": 0.0, "values": {"rollout/success": 0.25}}
    (run_dir / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    found = bench.read_study(tmp_path / "ingredients", bench.INGREDIENTS)
    assert found["grpo_pp"][1].end == {"t": [1.0]}
    assert found["grpo_pp"][1].curve == [0.25]
