"""The jobs of a sweep on disk: which there are, which have ended, and how."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from swe_rl.errors import ConfigError
from swe_rl.training.run_dir import write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    number: int
    overrides: tuple[str, ...]
    run_dir: Path
    swept: dict[str, str] = field(default_factory=dict)  # the part of the overrides in which jobs differ
    exit_code: int | None = None  # None: has not ended
    seconds: float = 0.0  # of the process that ended


class JobSource(Protocol):
    """Says what to run next."""

    def ask(self) -> Job | None:
        """The next job to start, None when there is none (now, or any more)."""
        ...

    def tell(self, job: Job) -> None:
        """A job that was asked for has ended."""
        ...


class Jobs:
    """The directory of a sweep. Raises ConfigError when it holds another sweep."""

    def __init__(self, directory: Path, *, described: Sequence[str]) -> None:
        self.directory = directory.absolute()
        self._started: dict[int, float] = {}
        self._known: dict[int, Job] = {}
        marker = self.directory / "sweep.json"
        if marker.exists() and json.loads(marker.read_text()) != list(described):
            raise ConfigError(f"run_dir={directory} holds another sweep ({marker.name}): choose another run_dir")
        if (self.directory / "config.yaml").exists():
            raise ConfigError(f"run_dir={directory} holds a single run: choose another run_dir")
        self.directory.mkdir(parents=True, exist_ok=True)
        write_atomic(marker, json.dumps(list(described), indent=1).encode())
        for path in sorted(self.directory.glob("*.json")):
            if path.stem.isdigit():
                job = self._read(path)
                self._known[job.number] = job

    @property
    def known(self) -> list[Job]:
        """Every job that was ever started, by number."""
        return [self._known[number] for number in sorted(self._known)]

    @property
    def ended_jobs(self) -> list[Job]:
        return [job for job in self.known if job.exit_code is not None]

    def make(self, number: int, overrides: Sequence[str], swept: dict[str, str]) -> Job:
        return Job(number=number, overrides=tuple(overrides), swept=swept, run_dir=self.directory / str(number))

    def grid(self, words: Sequence[Sequence[str]]) -> Grid:
        """A source of these jobs, without those that ended well before."""
        varying = {index for index in range(len(words[0])) if len({job[index] for job in words}) > 1}
        jobs = []
        for number, overrides in enumerate(words):
            swept = dict(overrides[index].split("=", 1) for index in sorted(varying))
            known = self._known.get(number)
            if known is None or known.exit_code != 0:
                jobs.append(self.make(number, overrides, swept))
        return Grid(jobs)

    def started(self, job: Job) -> None:
        """Writes down that a job runs."""
        self._started[job.number] = time.monotonic()
        self._write(replace(job, exit_code=None))

    def ended(self, job: Job, exit_code: int) -> Job:
        """Writes down how a job ended, and returns it."""
        done = replace(job, exit_code=exit_code, seconds=time.monotonic() - self._started[job.number])
        self._write(done)
        return done

    def _write(self, job: Job) -> None:
        self._known[job.number] = job
        described: dict[str, Any] = {**asdict(job), "run_dir": job.run_dir.name}
        write_atomic(self.directory / f"{job.number}.json", json.dumps(described).encode())

    def _read(self, path: Path) -> Job:
        stored = json.loads(path.read_text())
        return Job(**{**stored, "overrides": tuple(stored["overrides"]), "run_dir": self.directory / stored["run_dir"]})


class Grid:
    """The jobs of a product of values, in their order."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._waiting = list(jobs)

    def ask(self) -> Job | None:
        return self._waiting.pop(0) if self._waiting else None

    def tell(self, job: Job) -> None:
        """Nothing depends on it."""
