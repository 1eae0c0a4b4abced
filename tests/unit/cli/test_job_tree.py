"""A job of a sweep is a process tree that does not outlive its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A job that leaves a grandchild in a session of its own, as a careless tool would.
JOB = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "with open(sys.argv[1] + '.new', 'w') as file: file.write(f'{os.getpid()} {child.pid}')\n"
    "os.replace(sys.argv[1] + '.new', sys.argv[1])\n"
    "time.sleep(float(sys.argv[2]))\n"
)
DIRECT = "import sys; from swe_rl.cli.job_tree import run_job; sys.exit(run_job(sys.argv[1:]))"
SUPERVISED = (
    "import sys; from swe_rl.cli.job_tree import start_supervised; sys.exit(start_supervised(sys.argv[1:]).wait())"
)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def start(parent_code: str, pids: Path, *, seconds: float) -> tuple[subprocess.Popen[bytes], list[int]]:
    job = [sys.executable, "-c", JOB, str(pids), str(seconds)]
    parent = subprocess.Popen([sys.executable, "-c", parent_code, *job], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not pids.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return parent, [int(word) for word in pids.read_text().split()]


def wait_gone(pids: list[int], *, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes of the job are left"


@pytest.mark.parametrize("code", [DIRECT, SUPERVISED])
def test_what_a_job_leaves_behind_is_gone_when_it_ends(code: str, tmp_path: Path) -> None:
    parent, pids = start(code, tmp_path / "pids", seconds=0.1)
    assert parent.wait(20) == 0
    wait_gone(pids, timeout_s=0.0)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_the_job_and_ends_in_130(tmp_path: Path, sent: signal.Signals) -> None:
    parent, pids = start(DIRECT, tmp_path / "pids", seconds=600)
    parent.send_signal(sent)
    assert parent.wait(20) == 130
    wait_gone(pids, timeout_s=0.0)


def test_the_job_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent, (job, grandchild) = start(DIRECT, tmp_path / "pids", seconds=600)
    parent.kill()
    parent.wait(20)
    wait_gone([job])
    os.kill(grandchild, signal.SIGKILL)  # escaped into a session of its own: nobody is left to find it


def test_under_a_supervisor_nothing_survives_a_killed_parent(tmp_path: Path) -> None:
    parent, pids = start(SUPERVISED, tmp_path / "pids", seconds=600)
    parent.kill()
    parent.wait(20)
    wait_gone(pids)


@pytest.mark.parametrize("code", [DIRECT, SUPERVISED])
def test_exit_codes_come_back(code: str) -> None:
    for job, expected in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)):
        assert subprocess.run([sys.executable, "-c", code, sys.executable, "-c", job]).returncode == expected
