"""The whole loop through the command line: a run, its directory, kills, interrupts, resume, torchrun, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from swe_rl.rollout.journal import read_journal, read_parquet
from swe_rl.training import checkpoint
from swe_rl.types import Trajectory

SMALL = ["experiment=smoke", "threads=1"]


def command(run_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "swe_rl", "train", *SMALL, f"run_dir={run_dir}", *overrides]


def run(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(run_dir, *overrides), capture_output=True, text=True, timeout=560)


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    log = open(run_dir.with_suffix(".log"), "w")
    return subprocess.Popen(command(run_dir, *overrides), stdout=log, stderr=log, text=True, start_new_session=True)


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
    parquet = [t for path in sorted((run_dir / "rollouts").glob("*.parquet")) for t in read_parquet(path)]
    return parquet + [t for path in sorted((run_dir / "rollouts").glob("*.journal")) for t in read_journal(path)]


def check_finished(run_dir: Path) -> None:
    rows = json.loads((run_dir / "results.json").read_text())
    assert [row["phase"] for row in rows if row["mode"] == "sampled"] == ["base", "warm_start", "rft", "rl"]
    ids = [t.trajectory_id for t in all_rollouts(run_dir)]
    assert len(ids) == len(set(ids)), "a rollout was made twice"
    assert sum(t.group_id.startswith("rl/") for t in all_rollouts(run_dir)) == 2 * 3 * 4
    assert not list((run_dir / "rollouts").glob("*.journal"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("e2e") / "run"
    result = run(run_dir)
    assert result.returncode == 0, result.stderr
    assert "rl" in result.stderr + result.stdout
    return run_dir


@pytest.mark.slow
def test_run_directory_holds_everything(finished: Path) -> None:
    check_finished(finished)
    assert (finished / "config.yaml").exists()
    assert list((finished / "tb").glob("events*"))
    saved = checkpoint.load(checkpoint.latest(finished))  # type: ignore[arg-type]
    assert saved.counters["phase"] == 3
    weights = checkpoint.load_weights(finished / "phases" / "rl")
    assert all(bool(weights[name].equal(value)) for name, value in saved.backend["model"].items())


@pytest.mark.slow
def test_tokens_are_computed_once_and_engine_agrees_with_trainer(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    values = [line["values"] for line in lines if line["phase"] == "rl" and "train/logprob_abs_diff" in line["values"]]
    assert len(values) == 2
    assert all(v["train/logprob_abs_diff"] <= 1e-4 for v in values)


@pytest.mark.slow
def test_second_run_in_the_same_directory_is_refused(finished: Path) -> None:
    result = run(finished)
    assert result.returncode == 2
    assert "resume=true" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_finished_run_resumes_to_nothing(finished: Path) -> None:
    before = (finished / "results.json").read_bytes()
    result = run(finished, "resume=true")
    assert result.returncode == 0, result.stderr
    assert (finished / "results.json").read_bytes() == before


@pytest.mark.slow
def test_sigkill_during_rollouts_leaves_nothing_and_resume_repeats_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir)
    journal = run_dir / "rollouts" / "rl-000001.journal"
    wait_for(lambda: journal.exists() and journal.stat().st_size > 0, process)
    below = descendants(process.pid)
    process.kill()
    process.wait()
    kept = list(read_journal(journal))
    time.sleep(2)
    assert [entry for entry in below if identity(entry[0]) == entry] == []
    assert kept
    assert run(run_dir, "resume=true").returncode == 0
    check_finished(run_dir)
    after = {t.trajectory_id: t for t in all_rollouts(run_dir)}
    assert all(after[t.trajectory_id] == t for t in kept), "a finished rollout was made again"


@pytest.mark.slow
def test_sigkill_in_a_training_step_resumes(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir)
    done = run_dir / "rollouts" / "rl-000000.parquet"
    wait_for(lambda: done.exists(), process)  # written right after the step, while the checkpoint is being written
    process.kill()
    process.wait()
    assert run(run_dir, "resume=true").returncode == 0
    check_finished(run_dir)


@pytest.mark.slow
def test_first_interrupt_checkpoints_second_stops_at_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir)
    wait_for(lambda: (run_dir / "rollouts" / "rl-000000.journal").exists(), process)
    below = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=2) == 130
    time.sleep(2)
    assert [entry for entry in below if identity(entry[0]) == entry] == []
    process = start(run_dir, "resume=true")
    wait_for(lambda: (run_dir / "rollouts" / "rl-000001.journal").exists(), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert run(run_dir, "resume=true").returncode == 0
    check_finished(run_dir)


@pytest.mark.slow
def test_two_torchrun_processes_share_one_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    arguments = ["-m", "swe_rl", "train", *SMALL, f"run_dir={run_dir}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*launcher, *arguments], capture_output=True, text=True, timeout=560, env=env)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads((run_dir / "results.json").read_text())
    assert {row["num_tasks"] for row in rows if row["phase"] == "rl" and row["mode"] == "sampled"} == {6}


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
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, overrides: list[str], key: str) -> None:
    result = run(tmp_path / "run", *overrides)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1, result.stderr
    assert key in lines[0]
    assert not (tmp_path / "run").exists()


def test_an_unreadable_checkpoint_is_one_clear_line(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    broken = run_dir / "checkpoints" / "step-00000003"
    broken.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("")
    (broken / "state.json").write_text('{"format": 1, "files": {}, "backend": {}, "counters": {}}')
    result = run(run_dir, "resume=true")
    assert result.returncode == 2, result.stderr
    assert "step-00000003" in result.stderr.strip().splitlines()[-1]
