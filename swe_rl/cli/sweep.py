"""`-m`: one job after the other, each in its own process tree that does not outlive this process.

A job is a child in its own session. This process is the subreaper of everything below it, so what a job leaves behind
is found and killed when the job ends; should this process be killed, the kernel kills the running job.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from swe_rl.cli.hydra_entry import Options, sweep_jobs
from swe_rl.errors import ConfigError

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 600.0  # for a job to drain and checkpoint after the first interrupt


def run_sweep(options: Options, *, command: str, check: Callable[[Sequence[str]], Any]) -> int:
    """Runs every combination. Returns 0 when all jobs did, else the first job's exit code that is not 0.

    check: composes and validates the overrides of one job; all jobs are checked before the first one starts.
    """
    jobs = sweep_jobs(options.overrides)
    composed = [check(job) for job in jobs]
    if options.show_config:
        print("---\n".join(c.yaml for c in composed), end="")
        return 0
    base = f"multirun/{datetime.now():%Y%m%d-%H%M%S}"
    named = [_with_run_dir(job, composed[number].config, number, base) for number, job in enumerate(jobs)]
    codes: list[int] = []
    for number, job in enumerate(named):
        print(f"job {number + 1}/{len(named)}: {' '.join(job)}", file=sys.stderr, flush=True)
        codes.append(run_job([sys.executable, "-m", "swe_rl", command, *_passed_on(options), *job]))
        if codes[-1] == 130:
            break
    for job, code in zip(named, codes, strict=False):
        print(f"exit {code}: {' '.join(job)}", file=sys.stderr)
    return next((code for code in codes if code), 0)


def run_job(words: Sequence[str]) -> int:
    """Runs one command in its own session and returns its exit code; nothing below it survives.

    The first interrupt is passed on and the job may drain; the second kills it. Both end in exit code 130.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = _children()
    parent = os.getpid()

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended between fork and prctl
            os._exit(1)

    previous = signal.signal(signal.SIGTERM, _raise_interrupt)
    job = subprocess.Popen(list(words), start_new_session=True, preexec_fn=die_with_parent)
    try:
        return _as_exit_code(job.wait())
    except KeyboardInterrupt:
        _drain(job)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
        _kill_tree(job, before)


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


def _with_run_dir(job: Sequence[str], config: Any, number: int, base: str) -> tuple[str, ...]:
    """Gives each job a directory of its own: below the run_dir that was asked for, else below `base`."""
    if not hasattr(config, "run_dir"):
        return tuple(job)
    rest = tuple(word for word in job if not word.startswith("run_dir="))
    if getattr(config, "resume", False) and not config.run_dir:
        raise ConfigError("resume=true needs the sweep's directory: add run_dir=multirun/<date>")
    return (*rest, f"run_dir={config.run_dir or base}/{number}")


def _passed_on(options: Options) -> list[str]:
    return ["--config-dir", options.config_dir] if options.config_dir else []


def _as_exit_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _raise_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
