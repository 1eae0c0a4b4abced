from __future__ import annotations

import pytest

from swe_rl.config import TrainerConfig
from swe_rl.errors import ConfigError
from swe_rl.training.schedule import learning_rate, learning_rate_factor


def factors(schedule: str, *, warmup: int, total: int, ratio: float = 0.1) -> list[float]:
    return [
        learning_rate_factor(s, schedule=schedule, warmup_steps=warmup, total_steps=total, min_lr_ratio=ratio)
        for s in range(total)
    ]


def test_constant_after_warmup() -> None:
    assert factors("constant", warmup=3, total=6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_cosine_starts_at_one_and_ends_at_the_floor() -> None:
    assert factors("cosine", warmup=0, total=5) == pytest.approx([1.0, 0.868198, 0.55, 0.231802, 0.1], abs=1e-6)
    assert factors("cosine", warmup=2, total=5) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.55, 0.1])


def test_cosine_stays_at_the_floor_and_survives_tiny_runs() -> None:
    settings = {"schedule": "cosine", "warmup_steps": 0, "min_lr_ratio": 0.2}
    assert learning_rate_factor(50, total_steps=10, **settings) == pytest.approx(0.2)
    assert learning_rate_factor(0, total_steps=1, **settings) == 1.0


def test_learning_rate_scales_the_configured_peak() -> None:
    cfg = TrainerConfig(learning_rate=3e-4, schedule="cosine", min_lr_ratio=0.0)
    assert learning_rate(cfg, 5, total_steps=11) == pytest.approx(1.5e-4)


def test_unknown_schedule() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.schedule='linear'"):
        learning_rate_factor(0, schedule="linear", warmup_steps=0, total_steps=2, min_lr_ratio=0.1)
