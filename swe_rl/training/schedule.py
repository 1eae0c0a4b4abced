"""Learning rates as pure functions of the optimiser step: a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from swe_rl.config import TrainerConfig
from swe_rl.errors import ConfigError

SCHEDULES = ("constant", "cosine")


def learning_rate_factor(
    step: int, *, schedule: str, warmup_steps: int, total_steps: int, min_lr_ratio: float
) -> float:
    """Factor on the peak rate for optimiser step `step` (0 is the first), in (0, 1].

    Linear warm-up ends at 1 on step `warmup_steps`; "cosine" then falls to `min_lr_ratio` on the last step,
    total_steps - 1. Raises ConfigError for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"trainer.schedule={schedule!r} is unknown: use one of {', '.join(SCHEDULES)}")
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    span = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def learning_rate(cfg: TrainerConfig, step: int, *, total_steps: int) -> float:
    """AdamW's rate for optimiser step `step` of `total_steps`; Muon's follows by the ratio of the two peak rates."""
    factor = learning_rate_factor(
        step,
        schedule=cfg.schedule,
        warmup_steps=cfg.warmup_steps or round(cfg.warmup_ratio * total_steps),
        total_steps=total_steps,
        min_lr_ratio=cfg.min_lr_ratio,
    )
    return cfg.learning_rate * factor
