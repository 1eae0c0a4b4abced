"""The directory of one run: resolved config, journals, rollouts, metrics, checkpoints, phase weights, final table.

RUN/config.yaml               resolved configuration
RUN/journal/rank<r>.journal   finished rollouts, fsynced, append-only
RUN/rollouts/*.parquet        the same, compacted per optimiser step
RUN/metrics.jsonl, RUN/tb/    scalars
RUN/checkpoints/step-<n>/     weights, optimiser, counters
RUN/phases/<name>/            Hugging Face directory with the weights at the end of each phase
RUN/results.json              one row per phase, split and sampling mode
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def results_file(self) -> Path:
        return self.path / "results.json"

    def phase_weights(self, phase: str) -> Path:
        return self.path / "phases" / phase

    def results(self) -> list[dict[str, Any]]:
        """Rows of the final table written so far."""
        if not self.results_file.exists():
            return []
        return json.loads(self.results_file.read_text())

    def add_results(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows, replacing those of the same phase, split and mode (a resumed run evaluates again)."""
        keys = {(r["phase"], r["split"], r["mode"]) for r in rows}
        kept = [r for r in self.results() if (r["phase"], r["split"], r["mode"]) not in keys]
        write_atomic(self.results_file, json.dumps([*kept, *rows], indent=1).encode())


def open_run_dir(path: str, *, label: str, resume: bool, config_yaml: str) -> RunDir:
    """Creates the directory (or reopens it with `resume`). Only rank 0 calls this; the others get its name.

    Raises ConfigError when the directory already holds a run and `resume` is off, or holds none and it is on
    with an explicit path.
    """
    resolved = Path(path) if path else _latest(label) if resume else _fresh(label)
    marker = resolved / "config.yaml"
    if marker.exists() and not resume:
        raise ConfigError(
            f"run_dir={resolved} already holds a run: add resume=true to continue it or choose another run_dir"
        )
    if resume and not marker.exists():
        raise ConfigError(
            f"resume=true, but {resolved} holds no run (no config.yaml): drop resume=true to start one there"
        )
    run = RunDir(resolved.absolute())
    for folder in (run.path, run.journal, run.rollouts, run.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(marker, config_yaml.encode())
    return run


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces `path` so that a reader, or a kill at any moment, sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _fresh(label: str) -> Path:
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{label}"
    path, number = Path("runs") / stem, 1
    while path.exists():
        path, number = Path("runs") / f"{stem}-{number}", number + 1
    return path


def _latest(label: str) -> Path:
    runs = sorted(p.parent for p in Path("runs").glob(f"*-{label}*/config.yaml"))
    if not runs:
        raise ConfigError(f"resume=true, but there is no run under runs/*-{label}: name one with run_dir=PATH")
    return runs[-1]
