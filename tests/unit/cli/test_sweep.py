"""Sweeps: every job once, failures stay with their job, a repeated sweep goes on, one table over all."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from real_parts import require

from swe_rl.cli import sweep
from swe_rl.cli.dispatch import main
from swe_rl.cli.hydra_entry import Composed, Options, parse_options
from swe_rl.cli.sweep_jobs import Job
from swe_rl.config import TrainConfig
from swe_rl.errors import ConfigError

# A job that ends at once: it fails where `seed=3` is, else leaves what a run leaves.
JOB = """
import json, os, pathlib, sys
run_dir, words = pathlib.Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:])
with open(run_dir.parent / "started", "a") as file:
    file.write(run_dir.name + "\\n")
if words.get("seed") == "3" and not (run_dir.parent / "repaired").exists():
    sys.exit(1)
run_dir.mkdir(exist_ok=True)
x = float(words.get("x", 0))
row = {"phase": "rl", "split": "heldout", "mode": "sampled", "success": 1 - (x - 0.3) ** 2, "stderr": 0.01}
(run_dir / "results.json").write_text(json.dumps([row]))
"""
PARENT = """
import sys
from tests.unit.cli import test_sweep
test_sweep.run_slow_sweep(sys.argv[1])
"""


def composed(words: Sequence[str]) -> Composed[TrainConfig]:
    return Composed(TrainConfig(), "", {})


def quick(job: Job, options: Options, *, command: str) -> list[str]:
    return [sys.executable, "-c", JOB, str(job.run_dir), *job.overrides]


@pytest.fixture
def jobs_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "job_command", quick)


def started(directory: Path) -> list[int]:
    return sorted(int(line) for line in (directory / "started").read_text().split())


def results(directory: Path) -> list[dict[str, str]]:
    with open(directory / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def six(directory: Path, *, jobs: int = 2) -> Options:
    return Options(overrides=("seed=1,2,3", f"run_dir={directory}", "x=0.1,0.2"), multirun=True, jobs=jobs)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failed_job_loses_nothing_of_the_others(jobs_are_quick: None, tmp_path: Path, jobs: int) -> None:
    out = tmp_path / "out"
    assert sweep.run_sweep(six(out, jobs=jobs), command="train", check=composed) == 1
    rows = results(out)
    assert [(row["seed"], row["x"], row["exit_code"]) for row in rows] == [
        *(("1", "0.1", "0"), ("1", "0.2", "0"), ("2", "0.1", "0"), ("2", "0.2", "0")),
        *(("3", "0.1", "1"), ("3", "0.2", "1")),
    ]
    assert [row["rl/heldout/sampled"] for row in rows] == ["0.96", "0.99", "0.96", "0.99", "", ""]


def test_a_repeated_sweep_runs_only_what_did_not_end_well(jobs_are_quick: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sweep.run_sweep(six(out), command="train", check=composed)
    assert started(out) == [0, 1, 2, 3, 4, 5]
    (out / "repaired").touch()
    assert sweep.run_sweep(six(out), command="train", check=composed) == 0
    assert started(out) == [0, 1, 2, 3, 4, 4, 5, 5]
    assert {row["exit_code"] for row in results(out)} == {"0"}
    assert sweep.run_sweep(six(out), command="train", check=composed) == 0
    assert len(started(out)) == 8


def test_a_directory_keeps_its_sweep(jobs_are_quick: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sweep.run_sweep(six(out), command="train", check=composed)
    other = replace(six(out), overrides=("seed=1,2", f"run_dir={out}"))
    with pytest.raises(ConfigError, match="holds another sweep"):
        sweep.run_sweep(other, command="train", check=composed)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match="holds a single run"):
        sweep.run_sweep(six(tmp_path), command="train", check=composed)


def test_all_jobs_are_checked_before_the_first_one_starts(tmp_path: Path) -> None:
    def refuse(words: Sequence[str]) -> Composed[TrainConfig]:
        if "seed=2" in words:
            raise ConfigError("seed=2 is wrong")
        return composed(words)

    with pytest.raises(ConfigError, match="seed=2"):
        sweep.run_sweep(six(tmp_path / "out"), command="train", check=refuse)
    assert not (tmp_path / "out").exists()


def test_the_words_of_a_job(tmp_path: Path) -> None:
    job = Job(number=4, overrides=("seed=1",), run_dir=tmp_path / "4")
    options = Options(overrides=(), config_dir="mine")
    plain = sweep.job_command(job, options, command="train")
    assert plain[1:] == ["-m", "swe_rl", "train", "--config-dir", "mine", "seed=1", f"run_dir={tmp_path}/4"]
    job.run_dir.mkdir()
    (job.run_dir / "config.yaml").touch()
    ranks = sweep.job_command(job, replace(options, nproc_per_job=2), command="train")
    assert ranks[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert ranks[-1] == "resume=true"
    assert ranks[ranks.index("swe_rl") - 1] == "-m"


def run_slow_sweep(directory: str) -> None:
    """In a process of its own: every job writes its pid and sleeps."""
    code = (
        "import os, sys, time; open(sys.argv[1] + '.pid', 'w').write(str(os.getpid()))\n"
        "try: time.sleep(600)\nexcept KeyboardInterrupt: sys.exit(0)"
    )
    sweep.job_command = lambda job, options, *, command: [sys.executable, "-c", code, str(job.run_dir)]
    raise SystemExit(sweep.run_sweep(six(Path(directory)), command="train", check=composed))


def slow_sweep(directory: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(directory)], env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    files = [directory / "0.pid", directory / "1.pid"]
    while not all(path.exists() and path.read_text() for path in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    return parent, [int(path.read_text()) for path in files]


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 15) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def gone(pids: Sequence[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_all_running_jobs_and_no_other_one_starts(tmp_path: Path, sent: signal.Signals) -> None:
    parent, pids = slow_sweep(tmp_path / "out")
    parent.send_signal(sent)
    assert parent.wait(20) == 130
    assert gone(pids)
    assert not (tmp_path / "out" / "2.json").exists()
    assert [row["exit_code"] for row in results(tmp_path / "out")] == ["130", "130"]


def test_a_killed_sweep_leaves_no_process(tmp_path: Path) -> None:
    parent, pids = slow_sweep(tmp_path / "out")
    parent.kill()
    parent.wait(20)
    assert wait_for(lambda: gone(pids))
    states = [json.loads((tmp_path / "out" / f"{number}.json").read_text())["exit_code"] for number in (0, 1)]
    assert states == [None, None]


def test_a_sweep_of_the_real_command_shows_every_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-m", "experiment=smoke", "seed=1,2", "rollout.group_size=4,8", "--cfg"]) == 0
    documents = [yaml.safe_load(text) for text in capsys.readouterr().out.split("---\n")]
    found = [(document["seed"], document["rollout"]["group_size"]) for document in documents]
    assert found == [(1, 4), (1, 8), (2, 4), (2, 8)]
    assert main(["train", "-m", "experiment=smoke", "rollout.group_size=8,1", "--cfg"]) == 2
    assert "rollout.group_size=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "2"], "--jobs is for sweeps: add -m"),
        (["-m", "--jobs", "0"], "--jobs needs a number of at least 1, got '0'"),
        (["-m", "--trials"], "--trials needs a value"),
        (["-m", "seed=interval(0,1)"], "interval(...) needs --trials N"),
    ],
)
def test_options_of_sweeps(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        sweep.run_sweep(parse_options(words), command="train", check=composed)


def search(directory: Path, *, trials: int) -> Options:
    words = ("seed=1", "x=interval(-1.0,1.0)", "name=a,b", f"run_dir={directory}")
    return Options(overrides=words, multirun=True, trials=trials)


def test_a_search_looks_where_results_are_good_and_goes_on(jobs_are_quick: None, tmp_path: Path) -> None:
    require(importlib.util.find_spec("optuna") is not None, "package optuna")
    out = tmp_path / "out"
    assert sweep.run_sweep(search(out, trials=12), command="train", check=composed) == 0
    assert sweep.run_sweep(search(out, trials=24), command="train", check=composed) == 0
    assert started(out) == list(range(24)), "a trial was run twice"
    rows = results(out)
    assert all(-1 <= float(row["x"]) <= 1 and row["name"] in ("a", "b") for row in rows)
    early, late = ([abs(float(row["x"]) - 0.3) for row in part] for part in (rows[:10], rows[-10:]))
    assert sum(late) < sum(early), "the later trials are no nearer to the best value"


def test_a_search_needs_something_to_choose(tmp_path: Path) -> None:
    require(importlib.util.find_spec("optuna") is not None, "package optuna")
    options: Any = replace(search(tmp_path / "out", trials=2), overrides=("seed=1",))
    with pytest.raises(ConfigError, match="nothing to choose"):
        sweep.run_sweep(options, command="train", check=composed)
