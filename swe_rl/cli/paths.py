"""Where the commands keep their caches."""

from __future__ import annotations

from swe_rl.sandbox.cache_dir import cache_dir

__all__ = ["cache_dir"]
