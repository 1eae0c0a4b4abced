"""Inference engines: the embedded slot engine."""

from swe_rl.inference.embedded import EmbeddedEngine
from swe_rl.inference.scheduler import EngineCounters

__all__ = ["EmbeddedEngine", "EngineCounters"]
