"""The whole loop through the command line: a run, its directory, kills, interrupts, resume, torchrun, bad input."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bench_train_head
from swe_rl.cli.hydra_entry import compose_all
from swe_rl.config import TrainConfig
from swe_rl.metrics import read_metrics
from swe_rl.rollout.journal import read_journal, read_parquet
from swe_rl.training import checkpoint
from swe_rl.types import Trajectory

# The entropy bonus makes every step move the weights, although an untrained policy is never rewarded.
SMALL = ["experiment=smoke", "threads=1", "algo.entropy_coeff=0.01"]
DEMONSTRATIONS = "{name: warm_start, data: demonstrations, num_tasks: 8, samples_per_task: 1, batch_size: 4}"
TINY = [*SMALL, "eval={splits: {heldout: 2}, base_tasks: 2, greedy_tasks: 0}"]
TINY += [f"phases=[{DEMONSTRATIONS},{{name: rl, data: rollouts, steps: 3, tasks_per_step: 2}}]"]


def command(run_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "swe_rl", "train", f"run_dir={run_dir}", *overrides]


def run(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(run_dir, *overrides), capture_output=True, text=True, timeout=560)


def torchrun(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    arguments = [*launcher, *command(run_dir, *overrides)[1:]]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, capture_output=True, text=True, timeout=560, env=env)


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    with open(run_dir.with_suffix(".log"), "w") as log:
        return subprocess.Popen(command(run_dir, *overrides), stdout=log, stderr=log, text=True, start_new_session=True)


def said(run_dir: Path, words: str) -> bool:
    """Whether the process that was started last has printed `words`."""
    return words in run_dir.with_suffix(".log").read_text()


def descendants(pid: int) -> set[tuple[int, str]]:
    """(pid, start time) of every process below `pid`."""
    found: set[tuple[int, str]] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            if (entry := identity(int(child))) is not None:
                found |= {entry} | descendants(int(child))
    return found


def identity(pid: int) -> tuple[int, str] | None:
    """The process and its start time, None when it is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (pid, fields[19])


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], *, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "the run ended before the moment of the test"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def all_rollouts(run_dir: Path) -> list[Trajectory]:
    return _rollouts_in(run_dir / "rollouts")


def _rollouts_in(folder: Path) -> list[Trajectory]:
    parquet = [t for path in sorted(folder.glob("*.parquet")) for t in read_parquet(path)]
    return parquet + [t for path in sorted(folder.glob("*.journal")) for t in read_journal(path)]


def metrics(run_dir: Path, phase: str) -> list[dict[str, float]]:
    return [record.values for record in read_metrics(run_dir / "metrics.jsonl") if record.phase == phase]


def position(run_dir: Path) -> dict[str, int]:
    path = checkpoint.latest(run_dir)
    assert path is not None
    return checkpoint.load(path).counters


def check_finished(run_dir: Path) -> None:
    rows = json.loads((run_dir / "results.json").read_text())
    assert [row["phase"] for row in rows if row["mode"] == "sampled"] == ["base", "warm_start", "rft", "rl"]
    ids = [t.trajectory_id for t in all_rollouts(run_dir)]
    assert len(ids) == len(set(ids)), "a rollout was made twice"
    assert sum(t.group_id.startswith("rl/") for t in all_rollouts(run_dir)) == 2 * 3 * 4
    assert not list((run_dir / "rollouts").glob("*.journal"))


def check_same(run_dir: Path, uninterrupted: Path, kept: list[Trajectory]) -> None:
    """As if nothing had happened: what was on disk is what was used, and the final weights are equal bit for bit."""
    check_finished(run_dir)
    after = {t.trajectory_id: t for t in all_rollouts(run_dir)}
    assert all(after[t.trajectory_id] == t for t in kept), "a finished rollout was made again"
    for phase in ("warm_start", "rft", "rl"):
        weights, expected = (checkpoint.load_weights(d / "phases" / phase) for d in (run_dir, uninterrupted))
        assert all(weights[name].equal(value) for name, value in expected.items()), phase


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("e2e") / "run"
    result = run(run_dir, *SMALL)
    assert result.returncode == 0, result.stderr
    return run_dir


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed while it sampled the second step of rl."""
    run_dir = tmp_path_factory.mktemp("e2e") / "run"
    process = start(run_dir, *SMALL)
    journal = run_dir / "rollouts" / "rl-000001.journal"
    wait_for(lambda: journal.exists() and journal.stat().st_size > 0, process)
    below = descendants(process.pid)
    process.kill()
    process.wait()
    time.sleep(2)
    assert [entry for entry in below if identity(entry[0]) == entry] == [], "a sandbox outlived its run"
    return run_dir


def copy_of(run_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / "run"))


@pytest.mark.slow
def test_run_directory_holds_everything(finished: Path) -> None:
    check_finished(finished)
    assert (finished / "config.yaml").exists()
    assert list((finished / "tb").glob("events*"))
    saved = checkpoint.load(checkpoint.latest(finished))  # type: ignore[arg-type]
    assert saved.counters == {"phase": 3, "step": 0, "total": 8}
    weights = checkpoint.load_weights(finished / "phases" / "rl")
    assert all(bool(weights[name].equal(value)) for name, value in saved.backend["model"].items())
    before = checkpoint.load_weights(finished / "phases" / "rft")
    assert any(not weights[name].equal(value) for name, value in before.items()), "rl did not move the weights"


@pytest.mark.slow
def test_tokens_are_computed_once_and_engine_agrees_with_trainer(finished: Path) -> None:
    steps = metrics(finished, "rl")
    assert len(steps) == 2
    assert all(values["train/logprob_abs_diff"] <= 1e-4 for values in steps)
    assert all(values["engine/tokens_per_s"] > 0 for values in steps)
    tokens = sum(len(t.token_ids) for t in all_rollouts(finished) if not t.group_id.startswith("eval-rl-"))
    last = steps[-1]
    assert 0.9 * tokens <= last["engine/tokens_computed"] + last["engine/tokens_shared"] <= 1.05 * tokens
    assert last["engine/tokens_computed"] <= 1.05 * tokens


@pytest.mark.slow
def test_a_directory_keeps_its_run(finished: Path) -> None:
    stored = (finished / "config.yaml").read_bytes()
    for overrides, words in (
        ([], "resume=true"),
        (["resume=true", "trainer.weight_decay=0.1"], "trainer.weight_decay=0.1"),
    ):
        result = run(finished, *SMALL, *overrides)
        assert result.returncode == 2, result.stderr
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert (finished / "config.yaml").read_bytes() == stored


@pytest.mark.slow
def test_five_steps_on_recorded_rollouts_give_the_losses_of_the_plain_head(finished: Path) -> None:
    """The rollouts of so short a run all fail: advantages are made up, everything else is as recorded."""
    steps = bench_train_head.recorded_steps(finished, steps=5)
    generator = torch.Generator().manual_seed(0)
    for batches in steps:
        for i, batch in enumerate(batches):
            batches[i] = replace(batch, advantages=torch.randn(batch.advantages.shape, generator=generator))
    plain, ours = (bench_train_head.train(finished, steps, impl)[0] for impl in ("reference", "cpu"))
    assert len(set(plain)) == 5
    assert min(map(abs, plain)) > 1e-6
    assert ours == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
def test_a_finished_run_resumes_to_nothing(finished: Path) -> None:
    names = ("results.json", "config.yaml", "metrics.jsonl")
    before = [(finished / name).read_bytes() for name in names]
    result = run(finished, *SMALL, "resume=true")
    assert result.returncode == 0, result.stderr
    assert [(finished / name).read_bytes() for name in names] == before


@pytest.mark.slow
def test_killed_in_rollouts_then_in_a_training_step(killed: Path, finished: Path, tmp_path: Path) -> None:
    run_dir = copy_of(killed, tmp_path)
    kept = all_rollouts(run_dir)
    assert any(t.group_id.startswith("rl/1/") for t in kept)
    process = start(run_dir, *SMALL, "resume=true")
    journal = run_dir / "rollouts" / "rl-000001.journal"
    wait_for(lambda: len(list(read_journal(journal))) == 12, process)  # all there: the step begins
    time.sleep(0.05)
    process.kill()
    process.wait()
    kept += all_rollouts(run_dir)
    assert run(run_dir, *SMALL, "resume=true").returncode == 0
    check_same(run_dir, finished, kept)


@pytest.mark.slow
def test_first_interrupt_checkpoints_second_stops_at_once(killed: Path, finished: Path, tmp_path: Path) -> None:
    run_dir = copy_of(killed, tmp_path)
    process = start(run_dir, *SMALL, "resume=true")
    wait_for(lambda: said(run_dir, "phase rl: rollouts"), process)
    below = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=2) == 130
    time.sleep(2)
    assert [entry for entry in below if identity(entry[0]) == entry] == []
    kept = all_rollouts(run_dir)
    process = start(run_dir, *SMALL, "resume=true")
    wait_for(lambda: said(run_dir, "phase rl: rollouts"), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    kept += all_rollouts(run_dir)
    assert position(run_dir)["phase"] == 2
    assert run(run_dir, *SMALL, "resume=true").returncode == 0
    check_same(run_dir, finished, kept)


@pytest.mark.slow
def test_an_interrupt_is_heard_in_the_evaluation_and_in_demonstrations(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    long = [*TINY, "eval={splits: {heldout: 40}, base_tasks: 40, greedy_tasks: 0}"]  # more than run at once
    process = start(run_dir, *long)
    wait_for(lambda: (run_dir / "rollouts" / "eval-base-heldout-sampled-000000.journal").exists(), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not said(run_dir, "phase warm_start"), "it went on to the first phase"
    assert not (run_dir / "results.json").exists()
    process = start(run_dir, *long, "resume=true")
    wait_for(lambda: said(run_dir, "phase warm_start: demonstrations"), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert position(run_dir) == {"phase": 0, "step": 0, "total": 0}
    assert [row["phase"] for row in json.loads((run_dir / "results.json").read_text())] == ["base"]


@pytest.mark.slow
def test_rollouts_one_step_behind(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = run(run_dir, *TINY, "rollout.max_staleness=1", "eval.base_tasks=0")
    assert result.returncode == 0, result.stderr
    made = [t for t in all_rollouts(run_dir) if t.group_id.startswith("rl/")]
    assert len({t.trajectory_id for t in made}) == len(made) == 3 * 2 * 4
    turns = [(int(t.group_id.split("/")[1]), turn.completion) for t in made for turn in t.turns]
    start_version = min(completion.policy_version for _, completion in turns)
    for step, completion in turns:
        assert start_version + step - 1 <= completion.policy_version
        assert completion.policy_version_max <= start_version + step
    steps = metrics(run_dir, "rl")
    assert len(steps) == 3
    assert steps[0]["train/logprob_abs_diff"] <= 1e-4
    assert all(math.isfinite(value) for values in steps for value in values.values())


@pytest.mark.slow
@pytest.mark.parametrize(("fsdp", "context"), [("false", 1), ("true", 1), ("true", 2)])
def test_two_torchrun_processes_share_one_run(tmp_path: Path, fsdp: str, context: int) -> None:
    """With context=2 both compute most rows together; each has rollouts of its own all the same."""
    run_dir = tmp_path / "run"
    split = [f"trainer.context_parallel={context}", f"batching.max_tokens_per_batch={256 if context > 1 else 4096}"]
    result = torchrun(run_dir, *TINY, f"trainer.fsdp={fsdp}", *split, "eval.base_tasks=0")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads((run_dir / "results.json").read_text())
    assert [(row["phase"], row["num_tasks"]) for row in rows] == [("warm_start", 2), ("rl", 2)]
    for values in metrics(run_dir, "rl"):  # those of both ranks
        assert sum(value for name, value in values.items() if name.startswith("stop_reason/")) == 2 * 4
        assert values["train/logprob_abs_diff"] <= 1e-4
        assert (values["train/context_split_frac"] > 0) == (context > 1)
    made = {t.trajectory_id for folder in (run_dir / "rollouts").iterdir() for t in _rollouts_in(folder)}
    assert sum(name.startswith("rl/") for name in made) == 3 * 2 * 4
    assert position(run_dir) == {"phase": 2, "step": 0, "total": 5}
    if fsdp == "false":
        alone = run(run_dir, *TINY, f"trainer.fsdp={fsdp}", "eval.base_tasks=0", "resume=true")
        assert (alone.returncode, "2 ranks" in alone.stderr) == (2, True), alone.stderr


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algo.clip_hgih=0.3"], "algo.clip_hgih"),
        (["trainer.learning_rate=fast"], "trainer.learning_rate"),
        (["model.name=./no/such/dir"], "model.name"),
        (["task.source=/no/such/tasks"], "/no/such/tasks"),
        (["eval.splits={nowhere: 3}"], "nowhere"),
        (["rollout.group_size=1"], "rollout.group_size"),
        (["rollout.top_p=0.9"], "rollout.top_p"),
        (["init_weights=/no/such/weights"], "/no/such/weights"),
        (["resume=true"], "resume=true"),
        (["agent.max_turn_tokens=10000"], "agent.max_turn_tokens"),
        (["algo.stop_reasons.max_trns=mask"], "max_trns"),
        (["task.num_train=40"], "phases.warm_start.num_tasks=48"),
        (["trainer.context_parallel=2"], "trainer.context_parallel=2 does not divide the number of training processes"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, overrides: list[str], key: str) -> None:
    result = run(tmp_path / "run", *SMALL, *overrides)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1, result.stderr
    assert key in lines[0]
    assert not (tmp_path / "run").exists()


def test_an_unreadable_checkpoint_is_one_clear_line(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    broken = run_dir / "checkpoints" / "step-00000003"
    broken.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(compose_all(TrainConfig, "train", SMALL).yaml)
    (broken / "state.json").write_text('{"format": 1, "files": {}, "backend": {}, "counters": {}}')
    result = run(run_dir, *SMALL, "resume=true")
    assert result.returncode == 2, result.stderr
    assert "step-00000003" in result.stderr.strip().splitlines()[-1]
