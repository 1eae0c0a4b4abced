"""Weights of a supervised phase, kept between runs: the same configuration, seed and code give the same weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import swe_rl
from swe_rl.config import PhaseConfig, TrainConfig

# What decides the result of a supervised phase; evaluation, rollout and journal settings do not.
_GROUPS = ("model", "task", "agent", "algo", "batching", "trainer")
_SOURCES = ("tasks", "agents", "models", "batching", "training", "rollout/demonstrations.py", "ops", "algorithms")


def cached_weights(cache_dir: Path, phase: PhaseConfig, cfg: TrainConfig, *, world_size: int) -> Path:
    """Directory of the weights of this phase under `cache_dir`; it exists only when they were stored completely."""
    described: dict[str, object] = {group: asdict(getattr(cfg, group)) for group in _GROUPS}
    described |= {"phase": asdict(phase), "seed": cfg.seed, "init_weights": cfg.init_weights, "world_size": world_size}
    described["code"] = _digest_of_sources()
    key = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=12).hexdigest()
    return cache_dir / "phases" / f"{phase.name}-{key}"


def _digest_of_sources() -> str:
    root = Path(swe_rl.__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for source in _SOURCES for p in _python_files(root / source)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _python_files(path: Path) -> Iterable[Path]:
    return path.rglob("*.py") if path.is_dir() else [path]
