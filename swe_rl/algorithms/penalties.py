"""The soft penalty of over-long episodes: in tokens (DAPO, arXiv:2503.14476) or in turns (arXiv:2508.03501)."""

from __future__ import annotations

from swe_rl.errors import ConfigError
from swe_rl.types import Trajectory

UNITS = ("none", "tokens", "turns")


def soft_overlong(length: float, *, start: float, end: float, scale: float = 1.0) -> float:
    """0 up to `start`, then linearly down to -scale at `end`, and -scale beyond.

    DAPO in tokens: start = L_max - L_cache, end = L_max. Nebius in steps: start = L_thr, end = T_max.
    """
    return -scale * min(max((length - start) / (end - start), 0.0), 1.0)


def length_of(trajectory: Trajectory, unit: str) -> int:
    """Its sampled tokens (what tools print is not the policy's doing) or its turns."""
    if unit not in UNITS[1:]:
        raise ConfigError(f"algo.length_penalty={unit!r} is unknown: use one of {', '.join(UNITS)}")
    return trajectory.num_sampled_tokens if unit == "tokens" else len(trajectory.turns)
