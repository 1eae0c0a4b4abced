"""Engine processes end with their owner, also when that one is killed outright."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from swe_rl.inference.vllm import owner

# Loaded by its path: the processes need no torch for this.
WATCHER = """
import importlib.util, os, subprocess, sys, time
spec = importlib.util.spec_from_file_location("owner", sys.argv[1])
owner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(owner)
role = sys.argv[2]
if role == "trainer":  # starts an engine core, as vLLM does, and goes on
    owner.name_owner(os.environ)
if role != "worker":
    below = {"trainer": "core", "core": "worker"}[role]
    subprocess.Popen([sys.executable, "-c", sys.argv[3], sys.argv[1], below, sys.argv[3]])
else:  # only the worker imports what watches
    owner.remove_with_owner(owner.Path(os.environ["WEIGHTS"]))
    owner.watch_owner()
print(role, os.getpid(), flush=True)
time.sleep(600)
"""


def test_worker_and_core_end_when_the_trainer_is_killed_and_its_weights_go(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / owner.LOCKED).touch()
    trainer = subprocess.Popen(
        [sys.executable, "-c", WATCHER, owner.__file__, "trainer", WATCHER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "WEIGHTS": str(weights)},
    )
    assert trainer.stdout is not None
    pids = dict(trainer.stdout.readline().split() for _ in range(3))
    try:
        time.sleep(1.5)
        assert all(owner._started(int(pid)) for pid in pids.values())  # nobody ends while the trainer lives
        assert weights.exists()
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        deadline = time.monotonic() + 30
        while any(owner._started(int(pids[role])) for role in ("core", "worker")):
            assert time.monotonic() < deadline, f"still there: {pids}"
            time.sleep(0.1)
        assert not weights.exists()
    finally:
        for pid in pids.values():
            if Path(f"/proc/{pid}").exists():
                os.kill(int(pid), signal.SIGKILL)
        trainer.stdout.close()


def test_weights_that_somebody_writes_stay_when_a_replica_goes(tmp_path: Path) -> None:
    """A Ray actor ends with its engine, the trainer whose weights it read goes on."""
    with open(tmp_path / owner.LOCKED, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not owner.remove_unlocked(tmp_path)
    assert owner.remove_unlocked(tmp_path)
    assert not tmp_path.exists()


def test_without_an_owner_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(owner.OWNER, raising=False)
    before = threading.enumerate()
    owner.watch_owner()
    assert threading.enumerate() == before
