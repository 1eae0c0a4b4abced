"""Weights of a supervised phase, kept between runs: the same configuration, tasks, start, seed and code give the same
weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import swe_rl
from swe_rl.config import PhaseConfig, TrainConfig
from swe_rl.types import Task

# What decides the result of a supervised phase; evaluation and journal settings do not, and those of sampling and
# grading only through an earlier phase.
_GROUPS = ("model", "task", "sandbox", "agent", "algo", "batching", "trainer")
_SAMPLING = ("engine", "rollout", "reward")
_SAMPLING_SOURCES = ("inference", "rewards")
_SOURCES = (
    "agents",
    "algorithms",
    "batching",
    "models",
    "ops",
    "rollout",
    "sandbox",
    "tasks",
    "training",
    "cli/build.py",
    "sample_streams.py",
    "train_loop.py",
)
_SUFFIXES = (".py", ".jinja")


def cached_weights(
    cache_dir: Path, phase: PhaseConfig, cfg: TrainConfig, *, tasks: Sequence[Task], world_size: int
) -> Path:
    """Directory of the weights of this phase under `cache_dir`; it exists only when they were stored completely.

    `tasks` are the training tasks. Raises OSError if the weights in `init_weights` cannot be read.
    """
    earlier = cfg.phases[: [p.name for p in cfg.phases].index(phase.name)]
    groups = _GROUPS + (_SAMPLING if earlier else ())
    described: dict[str, object] = {group: asdict(getattr(cfg, group)) for group in groups}
    described |= {"phases": [asdict(p) for p in (*earlier, phase)], "seed": cfg.seed, "world_size": world_size}
    described["code"] = _digest_of_sources(_SOURCES + (_SAMPLING_SOURCES if earlier else ()))
    described["tasks"] = _digest_of_tasks(tasks)
    described["start"] = _digest_of_weights(cfg.init_weights)
    key = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=12).hexdigest()
    return cache_dir / "phases" / f"{phase.name}-{key}"


def _digest_of_sources(sources: Sequence[str]) -> str:
    root = Path(swe_rl.__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for source in sources for p in _source_files(root / source)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _source_files(path: Path) -> Iterable[Path]:
    return [p for p in path.rglob("*") if p.suffix in _SUFFIXES] if path.is_dir() else [path]


def _digest_of_tasks(tasks: Sequence[Task]) -> str:
    """Ids and contents: the base commit names the whole tree."""
    digest = hashlib.blake2b(digest_size=16)
    for task in tasks:
        tests = [*task.fail_to_pass, *task.pass_to_pass]
        digest.update(repr([task.task_id, task.base_commit, task.problem_statement, task.gold_patch, tests]).encode())
    return digest.hexdigest()


def _digest_of_weights(directory: str) -> str:
    if not directory:
        return ""
    with open(Path(directory) / "model.safetensors", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
