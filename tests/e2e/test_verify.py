"""`swe-rl verify` from end to end: a policy that knows two tasks by heart, judged, tested and selected from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swe_rl.cli.dispatch import main
from swe_rl.evaluation.candidates import read_candidates
from swe_rl.evaluation.execution_tests import read_tests
from swe_rl.evaluation.verifier_data import repository_of
from swe_rl.evaluation.verifier_model import read_manifest
from swe_rl.metrics import read_metrics
from swe_rl.rollout.journal import read_parquet
from swe_rl.tasks import load_tasks

SMALL = ["model.hidden_size=96", "model.num_layers=2", "model.intermediate_size=192", "model.vocab_size=1024"]
SMALL += ["threads=1", "task.num_train=2", "engine.num_slots=8", "seed=0", "sandbox.concurrency=8"]
AGENT = ["agent.max_turns=8", "agent.max_turn_tokens=160", "agent.max_context_tokens=640"]
AGENT += ["agent.max_observation_tokens=160"]
BY_HEART = (  # right in half of its edits, so that some attempts are solved and some are not
    "{name: warm_start, data: demonstrations, num_tasks: 2, samples_per_task: 8, p_right: 0.5, epochs: 12, "
    "batch_size: 2, evaluate: false, overrides: {trainer: {optimizer: muon, learning_rate: 3.0e-3}, "
    "algo: {aggregation: token_mean}}}"
)
JUDGED = (
    "{name: verifier, data: judged_rollouts, num_tasks: 2, samples_per_task: 8, epochs: 10, batch_size: 4, overrides: "
    "{trainer: {optimizer: muon, learning_rate: 3.0e-3}, algo: {aggregation: token_mean}}}"
)


def swe_rl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "swe_rl", *words], capture_output=True, text=True, timeout=500)


def reward_of_a_policy(tmp_path: Path, *, verifier: Path, start: Path) -> None:
    """A step of reinforcement learning with the verifier's opinion in the reward; refused on what it was trained on."""
    trained = set(read_manifest(verifier).repositories)
    seed = next(
        seed
        for seed in range(1, 99)
        if not trained & {repository_of(t) for t in load_tasks("minirepo", split="train", num_tasks=2, seed=seed)}
    )
    phase = "{name: rl, data: rollouts, steps: 1, tasks_per_step: 2, evaluate: false}"
    words = ["experiment=smoke", *SMALL, *AGENT, f"phases=[{phase}]", "eval={splits: {}, base_tasks: 0}"]
    words += [f"init_weights={start}", f"reward.verifier={verifier}", "reward.verifier_weight=0.5"]
    words += ["rollout.group_size=4", f"run_dir={tmp_path / 'rl'}"]
    refused = swe_rl("train", *words, "task.seed=0")
    assert refused.returncode == 2, refused.stderr[-2000:]
    assert "the verifier was trained on" in refused.stderr
    done = swe_rl("train", *words, f"task.seed={seed}")
    assert done.returncode == 0, done.stderr[-3000:]
    values = next(r.values for r in read_metrics(tmp_path / "rl" / "metrics.jsonl") if "verifier/score" in r.values)
    assert 0 < values["verifier/score"] < 1
    assert values["verifier/gap"] <= values["verifier/score"]
    assert values["verifier/hacking"] == 0
    rewards = [t.reward for t in read_parquet(tmp_path / "rl" / "rollouts" / "rl-000000.parquet") if t.reward]
    judged = [reward for reward in rewards if "verifier" in reward.terms]
    assert judged
    for reward in judged:
        assert reward.value == pytest.approx(reward.solved + 0.5 * (reward.terms["verifier"] - 0.5))


@pytest.mark.slow
def test_the_whole_pipeline_and_its_pieces(tmp_path: Path) -> None:
    first, run = tmp_path / "warm", tmp_path / "scaling"
    words = ["experiment=smoke", f"phases=[{BY_HEART}]", "eval.base_tasks=0", f"run_dir={first}"]
    made = swe_rl("train", *SMALL, *AGENT, *words)
    assert made.returncode == 0, made.stderr[-3000:]
    start = first / "phases" / "warm_start"
    words = ["experiment=test_time_scaling", *SMALL, f"init_weights={start}", f"phases=[{JUDGED}]", "task.seed=0"]
    words += ["eval.splits.heldout=2", "eval.samples_per_task=3", "verifier.balance=none", f"run_dir={run}"]
    words += ["verifier.test_tasks=2", "verifier.tests_per_task=1", "verifier.test_epochs=1"]
    done = swe_rl("verify", "pipeline", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    candidates = read_candidates(run)
    assert len(candidates) == 6
    assert all(item.ef_score is not None and item.regression is not None for item in candidates)
    tasks = {item.task_id for item in candidates}
    assert {test.task_id for test in read_tests(run)} == tasks
    manifest = read_manifest(run / "phases" / "verifier")
    assert len(manifest.tasks) == 2
    assert not tasks & set(manifest.tasks)
    assert "auc" in json.loads((run / "verifier_quality.json").read_text())
    assert (run / "selection" / "selection.csv").is_file()
    assert "hybrid" in done.stdout
    # again: everything is there already, and nothing changes
    before = (run / "candidates.jsonl").read_bytes()
    again = swe_rl("verify", "pipeline", *words, "resume=true")
    assert again.returncode == 0, again.stderr[-3000:]
    assert (run / "candidates.jsonl").read_bytes() == before
    # the same scores by the command for it, and none for what the verifier was trained on
    scored = swe_rl("verify", "score", str(run), "--verifier", str(run / "phases" / "verifier"), "--regression")
    assert scored.returncode == 0, scored.stderr[-3000:]
    want = {item.trajectory_id: item.ef_score for item in candidates}
    assert {item.trajectory_id: item.ef_score for item in read_candidates(run)} == pytest.approx(want, abs=1e-5)
    reward_of_a_policy(tmp_path, verifier=run / "phases" / "verifier", start=start)
    # recorded attempts of one run train a verifier in another
    once = JUDGED.replace("epochs: 10", "epochs: 1")
    words = ["experiment=test_time_scaling", *SMALL, f"init_weights={start}", f"phases=[{once}]"]
    words += [
        "~eval.splits.heldout",
        "model.lora_rank=4",
        "model.lora_alpha=8",
    ]  # adapters instead of all weights, merged in the end
    words += [f"verifier.rollouts=[{run}]", "verifier.balance=none", f"run_dir={tmp_path / 'second'}"]
    second = swe_rl("verify", "train", *words)
    assert second.returncode == 0, second.stderr[-3000:]
    wider = tmp_path / "second" / "phases" / "verifier"
    assert (wider / "adapter" / "adapter_config.json").is_file()
    assert tasks < set(read_manifest(wider).tasks)
    refused = swe_rl("verify", "score", str(run), "--verifier", str(wider))
    assert refused.returncode == 2
    assert "the verifier was trained on task" in refused.stderr


@pytest.mark.slow
def test_the_published_verifier_learns_from_recorded_attempts_of_two_runs(tmp_path: Path) -> None:
    """Two policies on the same tasks give the same ids: one always solves them, the other never."""
    runs = [tmp_path / policy for policy in ("oracle", "empty")]
    for run in runs:
        words = [f"policy={run.name}", "eval.splits={train: 2}", f"run_dir={run}", "sandbox.concurrency=4"]
        assert main(["eval", *words]) == 0
    words = ["experiment=r2e_verifier_smoke", f"verifier.rollouts=[{runs[0]},{runs[1]}]", f"run_dir={tmp_path / 'run'}"]
    assert main(["verify", "train", *words]) == 0
    made = tmp_path / "run" / "phases" / "verifier"
    assert (made / "adapter" / "adapter_config.json").is_file()
    manifest = read_manifest(made)
    assert (manifest.form, len(manifest.tasks)) == ("r2e", 2)
    values = read_metrics(tmp_path / "run" / "metrics.jsonl")[0].values
    assert (values["verifier/num_kept"], values["verifier/num_solved"]) == (4, 2)
