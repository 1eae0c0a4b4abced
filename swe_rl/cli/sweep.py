"""`-m`: many jobs, each in its own process tree, `--jobs` of them at a time; a sweep that was killed goes on.

SWEEP/sweep.json     what the sweep consists of: repeating it with the same run_dir must ask for the same
SWEEP/<n>/           the run directory of job n
SWEEP/<n>.json       its overrides and, when it has ended, its exit code
SWEEP/<n>.log        its output when several run at a time
SWEEP/results.csv    one row per job

Repeated with the same run_dir, jobs that ended well are not run again, and the others go on where they stopped.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from swe_rl.cli.hydra_entry import Options, fixed_and_swept, sweep_jobs
from swe_rl.cli.job_tree import start_supervised
from swe_rl.cli.sweep_jobs import Job, Jobs, JobSource
from swe_rl.cli.sweep_table import print_table, write_table
from swe_rl.errors import ConfigError

INTERRUPTED = 130
OWN_KEYS = ("run_dir", "resume")  # of the sweep, not of a job


def run_sweep(options: Options, *, command: str, check: Callable[[Sequence[str]], Any]) -> int:
    """Runs every combination, or `options.trials` that optuna chooses. Returns 0 when all jobs did, 130 after an
    interrupt, else the exit code of the first job that failed.

    check: composes and validates the overrides of one job; all jobs of a grid are checked before the first one starts.
    """
    overrides = tuple(word for word in options.overrides if word.lstrip("+").partition("=")[0] not in OWN_KEYS)
    asked = dict(word.lstrip("+").split("=", 1) for word in options.overrides if word not in overrides)
    if options.trials:
        from swe_rl.cli.sweep_search import Search

        search = Search(*fixed_and_swept(overrides), trials=options.trials, metric=options.metric, check=check)
        if options.show_config:
            raise ConfigError("--cfg cannot show what --trials will choose: leave one of them out")
        jobs = Jobs(_directory(asked), described=["--trials", *overrides])
        return _finish(jobs, run_all(search.attach(jobs), jobs, options, command=command), metric=options.metric)
    grid = sweep_jobs(overrides)
    composed = [check(words) for words in grid]
    if options.show_config:
        print("---\n".join(c.yaml for c in composed), end="")
        return 0
    jobs = Jobs(_directory(asked), described=[" ".join(words) for words in grid])
    return _finish(jobs, run_all(jobs.grid(grid), jobs, options, command=command), metric=options.metric)


def run_all(source: JobSource, jobs: Jobs, options: Options, *, command: str) -> bool:
    """Runs what `source` asks for, `options.jobs` at a time; False when interrupted. Failures are the job's alone.

    The first interrupt is passed on to the running jobs and no other one starts; the second kills them.
    """
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    stopping = False
    with _sigterm_interrupts():
        while True:
            try:
                while not stopping and len(running) < options.jobs and (job := source.ask()) is not None:
                    print(f"job {job.number}: {' '.join(job.overrides)}", file=sys.stderr, flush=True)
                    process = _start(job, jobs, options, command=command)
                    running[os.pidfd_open(process.pid)] = (job, process)
                if not running:
                    return not stopping
                for place in select.select(list(running), [], [])[0]:
                    job, process = running.pop(place)
                    os.close(place)
                    source.tell(jobs.ended(job, process.wait()))
            except KeyboardInterrupt:
                stopping = True
                for _, process in running.values():
                    process.send_signal(signal.SIGINT)


def job_command(job: Job, options: Options, *, command: str) -> list[str]:
    """The words that run one job: under torchrun with --nproc-per-job."""
    launcher: list[str] = []
    if options.nproc_per_job:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.nproc_per_job)]
        launcher += ["--shutdown-timeout", "600", "-m"]
    passed_on = ["--config-dir", options.config_dir] if options.config_dir else []
    resume = ["resume=true"] if (job.run_dir / "config.yaml").exists() else []
    words = [*passed_on, *job.overrides, f"run_dir={job.run_dir}", *resume]
    return [sys.executable, "-m", *launcher, "swe_rl", *command.split(), *words]


def _start(job: Job, jobs: Jobs, options: Options, *, command: str) -> subprocess.Popen[bytes]:
    words = job_command(job, options, command=command)
    jobs.started(job)
    if options.jobs == 1:
        return start_supervised(words)
    with open(job.run_dir.with_suffix(".log"), "ab") as log:
        return start_supervised(words, log=log)


def _finish(jobs: Jobs, finished: bool, *, metric: str) -> int:
    """Writes and prints the table; the exit code."""
    rows = write_table(jobs.ended_jobs, jobs.directory / "results.csv")
    print_table(rows, metric=metric)
    print(f"sweep directory: {jobs.directory} (repeat with run_dir={jobs.directory} to go on)", file=sys.stderr)
    if not finished:
        return INTERRUPTED
    return next((job.exit_code for job in jobs.ended_jobs if job.exit_code), 0)


def _directory(asked: dict[str, str]) -> Path:
    if asked.get("resume", "false") != "false" and "run_dir" not in asked:
        raise ConfigError("resume=true needs the sweep's directory: add run_dir=multirun/<date>")
    return Path(asked.get("run_dir") or f"multirun/{datetime.now():%Y%m%d-%H%M%S}")


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM as a Ctrl-C, while jobs run."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
