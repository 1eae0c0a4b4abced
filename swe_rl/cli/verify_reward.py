"""The verifier that reward.verifier names, for training runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swe_rl.agents.rendering import Renderer
from swe_rl.config import TrainConfig
from swe_rl.evaluation.verifier_service import TrainedVerifier, open_verifier
from swe_rl.types import Task


def load_verifier(cfg: TrainConfig, renderer: Renderer, tasks: Sequence[Task]) -> TrainedVerifier | None:
    """The verifier of the reward, None where there is none. ConfigError when it was trained on one of `tasks`."""
    if not cfg.reward.verifier:
        return None
    verifier = open_verifier(
        Path(cfg.reward.verifier),
        agent=cfg.agent,
        policy=renderer,
        max_batch_tokens=cfg.batching.max_tokens_per_batch,
        dtype=cfg.engine.dtype,
    )
    verifier.check(tasks)
    return verifier
