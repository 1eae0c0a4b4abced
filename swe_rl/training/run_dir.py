"""The directory of one run: resolved config, journals, rollouts, metrics, checkpoints, phase weights, final table.

RUN/config.yaml               resolved configuration, written once: a resumed run must have the same
RUN/world_size                number of ranks; a resumed run must have as many
RUN/rollouts/*.journal        finished rollouts of the step under way, fsynced, append-only
RUN/rollouts/*.parquet        the same, compacted per optimiser step; under torchrun both are in rollouts/rank<r>/
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
from urllib.parse import quote

from omegaconf import OmegaConf

from swe_rl.errors import ConfigError

FREE_ON_RESUME = ("resume", "run_dir", "threads")  # the keys that a resumed run may have otherwise
LAYOUT_KEYS = (  # as well: how Megatron's ranks share the model changes no number, and a checkpoint fits every layout
    *("tensor_parallel", "context_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel"),
    *("offload", "activation_checkpointing"),
)


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    def rollouts_of(self, rank: int, *, world_size: int) -> Path:
        """Where one rank keeps its rollouts."""
        return self.rollouts if world_size == 1 else self.rollouts / f"rank{rank}"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def results_file(self) -> Path:
        return self.path / "results.json"

    def phase_weights(self, phase: str) -> Path:
        return self.path / "phases" / phase

    def has_rollouts(self, phase: str) -> bool:
        """True if some rank has begun to train on rollouts of this phase."""
        return any(self.rollouts.rglob(f"{quote(phase, safe='')}-[0-9][0-9][0-9][0-9][0-9][0-9].*"))

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


def open_run_dir(path: str, *, label: str, resume: bool, config_yaml: str, world_size: int = 1) -> RunDir:
    """Creates the directory (or reopens it with `resume`). Only rank 0 calls this; the others get its name.

    Raises ConfigError when the directory already holds a run and `resume` is off, when it holds none and it is on, and
    when the run to resume had another configuration or number of ranks.
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
    if resume:
        _check_same(run.path, config_yaml, world_size=world_size)
        return run
    for folder in (run.path, run.rollouts, run.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(run.path / "world_size", f"{world_size}\n".encode())
    write_atomic(marker, config_yaml.encode())  # last: it makes the directory a run
    return run


def check_ranks_agree(config_yaml: str) -> None:
    """ConfigError, on every rank, unless all ranks were started with the same configuration. Collective."""
    from swe_rl.training import mesh  # torch, which those who only look into a directory do not need

    first, *others = (_flat(OmegaConf.to_container(OmegaConf.create(t))) for t in mesh.gather_objects([config_yaml]))
    for rank, other in enumerate(others, start=1):
        for key in [*first, *(key for key in other if key not in first)]:
            if first.get(key) != other.get(key):
                raise ConfigError(
                    f"{key} is {first.get(key)} on rank 0 and {other.get(key)} on rank {rank}: start all nodes with "
                    "the same words and files"
                )


def _check_same(run_dir: Path, config_yaml: str, *, world_size: int) -> None:
    """A run goes on as it began: another configuration would make its results those of neither."""
    stored = (run_dir / "world_size").read_text().strip() if (run_dir / "world_size").exists() else "1"
    if stored != str(world_size):
        raise ConfigError(
            f"resume=true: the run in {run_dir} has {stored} ranks, this one {world_size}: start as many processes"
        )
    before = _flat(OmegaConf.to_container(OmegaConf.create((run_dir / "config.yaml").read_text())))
    now = _flat(OmegaConf.to_container(OmegaConf.create(config_yaml)))
    megatron = now.get("trainer.backend") == before.get("trainer.backend") == "megatron"
    free_layout = {f"trainer.{key}" for key in LAYOUT_KEYS} if megatron else set()
    for key in [*now, *(key for key in before if key not in now)]:
        free = key.split(".")[0] in FREE_ON_RESUME or key in free_layout
        if not free and before.get(key) != now.get(key):
            raise ConfigError(
                f"resume=true: {key}={now.get(key)} is {before.get(key)} in the run in {run_dir}: "
                "repeat its settings, or start a new run"
            )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; members of a list go by their `name` (phases do have one), else by their place."""
    if isinstance(value, dict) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        items = [(str(i.get("name", n)) if isinstance(i, dict) else str(n), i) for n, i in enumerate(value)]
    else:
        return {prefix: value}
    flat = [_flat(item, f"{prefix}.{key}" if prefix else key) for key, item in items]
    return {key: item for part in flat for key, item in part.items()}


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
