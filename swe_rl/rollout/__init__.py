"""Rollouts: seeds, runner of one, collector of groups, journal on disk, buffer to the trainer."""

from swe_rl.rollout.buffer import RolloutBuffer
from swe_rl.rollout.collector import Collector, CollectorStats, Drained
from swe_rl.rollout.journal import Journal, RolloutKey
from swe_rl.rollout.runner import RolloutParts, RolloutRunner
from swe_rl.rollout.seeds import stable_seed, turn_seed

__all__ = [
    "Collector",
    "CollectorStats",
    "Drained",
    "Journal",
    "RolloutBuffer",
    "RolloutKey",
    "RolloutParts",
    "RolloutRunner",
    "stable_seed",
    "turn_seed",
]
