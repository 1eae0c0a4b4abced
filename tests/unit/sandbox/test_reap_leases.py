"""Heartbeats of owners: who is alive, who has expired, what is removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swe_rl.cli import dispatch
from swe_rl.sandbox import owner
from swe_rl.sandbox.owner import OwnerLease, is_alive, owner_label
from swe_rl.sandbox.reap import reap


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    directory = tmp_path / "owners"
    monkeypatch.setattr(owner, "leases_dir", lambda: directory)
    return directory


def test_one_heartbeat_per_process_however_many_use_it(own_directory: Path) -> None:
    one, two = OwnerLease.acquire("run"), OwnerLease.acquire("run")
    assert one is two
    path = own_directory / f"{owner_label()}.json"
    assert json.loads(path.read_text())["run_id"] == "run"
    one.release()
    assert path.exists()
    two.release()
    assert not path.exists()
    assert own_directory.stat().st_mode & 0o777 == 0o700


def test_a_heartbeat_that_cannot_be_written_ends_no_run(own_directory: Path) -> None:
    own_directory.write_text("in the way")
    one, two = OwnerLease.acquire("run"), OwnerLease.acquire("run")
    assert is_alive(owner_label())
    two.release()
    one.release()
    own_directory.unlink()
    again = OwnerLease.acquire("run")
    assert (own_directory / f"{owner_label()}.json").exists()
    again.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"beat_s": null}', '{"beat_s": "x"}'])
def test_a_damaged_heartbeat_proves_nothing(own_directory: Path, text: str) -> None:
    own_directory.mkdir(0o700)
    (own_directory / f"{owner_label()}.json").write_text(text)
    assert is_alive(owner_label())


def test_it_beats_again_and_again(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 0.01)
    lease = OwnerLease.acquire("run")
    path = own_directory / f"{owner_label()}.json"
    first = json.loads(path.read_text())["beat_s"]
    deadline = time.monotonic() + 5
    while json.loads(path.read_text())["beat_s"] == first and time.monotonic() < deadline:
        time.sleep(0.01)
    assert json.loads(path.read_text())["beat_s"] > first
    lease.release()


def test_whoever_stops_beating_is_dead_though_its_process_lives(own_directory: Path) -> None:
    own_directory.mkdir(mode=0o700)
    path = own_directory / f"{owner_label()}.json"
    path.write_text(json.dumps({"beat_s": time.monotonic() - owner.LEASE_S + 5}))
    assert is_alive(owner_label())
    path.write_text(json.dumps({"beat_s": time.monotonic() - owner.LEASE_S - 5}))
    assert not is_alive(owner_label())
    path.write_text("torn")
    assert is_alive(owner_label())  # no proof of death


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of somebody else")
def test_a_directory_of_another_user_proves_nothing(own_directory: Path) -> None:
    own_directory.mkdir(mode=0o777)
    (own_directory / f"{owner_label()}.json").write_text(json.dumps({"beat_s": -1e9}))
    os.chown(own_directory, 1234, 1234)
    assert is_alive(owner_label())


def test_files_of_the_dead_are_removed_and_those_of_the_living_are_not(own_directory: Path) -> None:
    code = "from swe_rl.sandbox.owner import owner_label; print(owner_label())"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    lease = OwnerLease.acquire("run")
    (own_directory / f"{dead}.json").write_text(json.dumps({"beat_s": time.monotonic()}))
    found = reap()
    assert found.leases == 1
    assert [path.stem for path in own_directory.glob("*.json")] == [owner_label()]
    lease.release()


def test_the_command_says_what_it_removed(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch.main(["sandbox", "reap"]) == 0
    words = capsys.readouterr().out
    assert words.startswith("removed ")
    assert words.endswith(" containers\n")
