"""Sampling seeds that depend on what is sampled, never on when or where: a repeated rollout gives the same tokens."""

from __future__ import annotations

import hashlib
import json


def stable_seed(*parts: str | int) -> int:
    """A seed in [0, 2**63) from the parts, the same on every machine and in every process (blake2b over their JSON)."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def turn_seed(*, run_seed: int, phase: str, step: int, task_id: str, rollout_index: int, turn: int) -> int:
    """Seed of one turn: turn `turn` of rollout `rollout_index` of `task_id` in policy step `step` of `phase`."""
    return stable_seed("turn", run_seed, phase, step, task_id, rollout_index, turn)
