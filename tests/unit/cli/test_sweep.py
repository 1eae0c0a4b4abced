"""Jobs of a sweep: separate process trees, none of which outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from swe_rl.cli import sweep
from swe_rl.cli.dispatch import main
from swe_rl.cli.hydra_entry import Composed, Options
from swe_rl.config import TrainConfig
from swe_rl.errors import ConfigError

# A job that leaves a grandchild in a session of its own, as a careless tool would.
JOB = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "with open(sys.argv[1] + '.new', 'w') as file: file.write(f'{os.getpid()} {child.pid}')\n"
    "os.replace(sys.argv[1] + '.new', sys.argv[1])\n"
    "time.sleep(float(sys.argv[2]))\n"
)
PARENT = "import sys; from swe_rl.cli.sweep import run_job; sys.exit(run_job(sys.argv[1:]))"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def start(pids: Path, *, seconds: float) -> tuple[subprocess.Popen[bytes], list[int]]:
    job = [sys.executable, "-c", JOB, str(pids), str(seconds)]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *job], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not pids.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return parent, [int(word) for word in pids.read_text().split()]


def wait_gone(pids: list[int], *, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes of the job are left"


def test_what_a_job_leaves_behind_is_gone_when_it_ends(tmp_path: Path) -> None:
    parent, pids = start(tmp_path / "pids", seconds=0.1)
    assert parent.wait(20) == 0
    wait_gone(pids, timeout_s=0.0)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_the_job_and_ends_in_130(tmp_path: Path, sent: signal.Signals) -> None:
    parent, pids = start(tmp_path / "pids", seconds=600)
    parent.send_signal(sent)
    assert parent.wait(20) == 130
    wait_gone(pids, timeout_s=0.0)


def test_the_job_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent, (job, grandchild) = start(tmp_path / "pids", seconds=600)
    parent.kill()
    parent.wait(20)
    wait_gone([job])
    os.kill(grandchild, signal.SIGKILL)  # escaped into a session of its own: nobody is left to find it


def test_exit_codes_come_back() -> None:
    code = "import sys; from swe_rl.cli.sweep import run_job; sys.exit(run_job([sys.executable, '-c', sys.argv[1]]))"
    for job, expected in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)):
        assert subprocess.run([sys.executable, "-c", code, job]).returncode == expected


def composed(words: object) -> Composed[TrainConfig]:
    config = TrainConfig()
    for word in words:  # type: ignore[attr-defined]
        key, value = word.split("=")
        setattr(config, key, value)
    return Composed(config, "", {})


def test_every_job_gets_a_directory_and_all_are_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(sweep, "run_job", lambda words: ran.append(list(words)) or (1 if len(ran) == 1 else 0))
    options = Options(overrides=("seed=1,2", "run_dir=out"), multirun=True, config_dir="mine")
    assert sweep.run_sweep(options, command="train", check=composed) == 1
    assert [words[1:] for words in ran] == [
        ["-m", "swe_rl", "train", "--config-dir", "mine", "seed=1", "run_dir=out/0"],
        ["-m", "swe_rl", "train", "--config-dir", "mine", "seed=2", "run_dir=out/1"],
    ]
    ran.clear()

    def refuse(words: object) -> Composed[TrainConfig]:
        if "seed=2" in words:  # type: ignore[operator]
            raise ConfigError("seed=2 is wrong")
        return composed(words)

    with pytest.raises(ConfigError, match="seed=2"):
        sweep.run_sweep(Options(overrides=("seed=1,2",)), command="train", check=refuse)
    assert ran == []


def test_no_job_starts_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(sweep, "run_job", lambda words: ran.append(words) or 130)
    assert sweep.run_sweep(Options(overrides=("seed=1,2,3",)), command="train", check=composed) == 130
    assert len(ran) == 1
    assert ran[0][-1].startswith("run_dir=multirun/")


def test_a_sweep_of_the_real_command_shows_every_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-m", "experiment=smoke", "seed=1,2", "rollout.group_size=4,8", "--cfg"]) == 0
    documents = [yaml.safe_load(text) for text in capsys.readouterr().out.split("---\n")]
    found = [(document["seed"], document["rollout"]["group_size"]) for document in documents]
    assert found == [(1, 4), (1, 8), (2, 4), (2, 8)]
    assert main(["train", "-m", "experiment=smoke", "rollout.group_size=8,1", "--cfg"]) == 2
    assert "rollout.group_size=1" in capsys.readouterr().err
