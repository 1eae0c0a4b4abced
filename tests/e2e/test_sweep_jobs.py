"""A sweep of real training jobs, two at a time: one fails, the sweep is killed in the middle and repeated."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# 300 ids are too few for the words of the task family: that job fails after it has started.
VOCABULARIES = (640, 641, 300, 642, 643, 644)
RL = "{name: rl, data: rollouts, steps: 1, tasks_per_step: 1, evaluate: false}"


def command(directory: Path) -> list[str]:
    words = ["experiment=recipe_comparison_smoke", f"phases=[{RL}]", "eval.base_tasks=0", "task.num_train=2"]
    words += ["agent.max_turns=2", f"run_dir={directory}", f"model.vocab_size={','.join(map(str, VOCABULARIES))}"]
    return [sys.executable, "-m", "swe_rl", "train", "-m", "--jobs", "2", *words]


def processes_about(directory: Path) -> list[str]:
    """Command lines of live processes that name the directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(directory) in line:
                found.append(line)
    return found


def exit_codes(directory: Path) -> dict[int, int | None]:
    files = [path for path in directory.glob("*.json") if path.stem.isdigit()]
    return {int(path.stem): json.loads(path.read_text())["exit_code"] for path in files}


@pytest.mark.slow
def test_six_jobs_of_which_one_fails_killed_and_repeated(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command(out), stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 300
    while not any(code is not None for code in exit_codes(out).values()) and time.monotonic() < deadline:
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while processes_about(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_about(out) == [], "a job outlived its sweep"
    before = {number for number, code in exit_codes(out).items() if code == 0}
    assert before
    assert len(exit_codes(out)) < 6
    untouched = {number: (out / str(number) / "metrics.jsonl").stat().st_mtime_ns for number in before}

    again = subprocess.run(command(out), capture_output=True, text=True, timeout=500)
    assert again.returncode == 2, again.stderr[-3000:]
    assert exit_codes(out) == {number: 2 if size == 300 else 0 for number, size in enumerate(VOCABULARIES)}
    assert {number: (out / str(number) / "metrics.jsonl").stat().st_mtime_ns for number in before} == untouched
    assert processes_about(out) == []
    with open(out / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["model.vocab_size"]) for row in rows] == list(VOCABULARIES)
    assert [row["rollout/success"] != "" for row in rows] == [size != 300 for size in VOCABULARIES]
