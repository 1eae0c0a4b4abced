"""One job and everything below it: `python -m swe_rl.cli.job_tree WORD...` runs a command, and nothing of it is left.

The supervisor is the subreaper of what it starts, so processes that a job leaves behind (workers of a killed torchrun
among them) come to it and are killed when the job ends. When the supervisor's own parent dies, the job is killed at
once; should the supervisor itself be killed, the kernel kills the job's first process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 600.0  # for a job to drain and checkpoint after the first interrupt
KILLED = 137


def start_supervised(words: Sequence[str], *, log: Any = None) -> subprocess.Popen[bytes]:
    """Starts a command under a supervisor of its own in a session of its own; `log` takes its output.

    SIGINT to the supervisor is passed on and the job may drain, a second one kills it. The exit code is the job's, 130
    after an interrupt.
    """
    command = [sys.executable, "-m", "swe_rl.cli.job_tree", *words]
    return subprocess.Popen(
        command, start_new_session=True, preexec_fn=told_of_parents_death(signal.SIGTERM), stdout=log, stderr=log
    )


def run_job(words: Sequence[str]) -> int:
    """Runs one command in its own session and returns its exit code; nothing below it survives.

    The first interrupt is passed on and the job may drain; the second kills it. Both end in exit code 130.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before, parent = _children(), os.getppid()
    previous = signal.signal(signal.SIGTERM, _raise_interrupt)
    job = subprocess.Popen(list(words), start_new_session=True, preexec_fn=told_of_parents_death(signal.SIGKILL))
    try:
        return _as_exit_code(job.wait())
    except KeyboardInterrupt:
        if os.getppid() != parent:
            return KILLED  # nobody waits for this job any more
        _drain(job)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
        _kill_tree(job, before)


def told_of_parents_death(number: int) -> Callable[[], None]:
    """A preexec function: the kernel sends signal `number` to the child when the thread that started it is gone."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask_for_it() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it ended between fork and prctl
            os._exit(1)

    return ask_for_it


def _drain(job: subprocess.Popen[bytes]) -> None:
    """Passes one interrupt on and waits; a second one ends the waiting."""
    try:
        job.send_signal(signal.SIGINT)
        job.wait(GRACE_S)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        print("killing the running job", file=sys.stderr)


def _kill_tree(job: subprocess.Popen[bytes], before: set[int]) -> None:
    """SIGKILL for the job's group, then for whatever was orphaned to this process, until nothing is left."""
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    deadline = time.monotonic() + 10.0
    while (orphans := _children() - before) and time.monotonic() < deadline:
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue


def _children() -> set[int]:
    """Direct children of this process, found through /proc (`children` files are not in every kernel)."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(entry.name))
    return found


def _as_exit_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _raise_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(run_job(sys.argv[1:]))
