"""Where caches live: SWE_RL_CACHE, else XDG_CACHE_HOME/swe_rl, else ~/.cache/swe_rl."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache directory, made if need be. Everything in it can be deleted at any time."""
    base = os.environ.get("SWE_RL_CACHE")
    path = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swe_rl"
    path.mkdir(parents=True, exist_ok=True)
    return path
