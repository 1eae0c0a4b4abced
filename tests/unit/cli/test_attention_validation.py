"""Checks of trainer.attention."""

from __future__ import annotations

import pytest

from swe_rl.config import PhaseConfig, TrainConfig, validate
from swe_rl.errors import ConfigError


def make(**trainer: str) -> TrainConfig:
    cfg = TrainConfig(phases=[PhaseConfig(name="rl", steps=2)])
    for key, value in trainer.items():
        setattr(cfg.trainer, key, value)
    return cfg


@pytest.mark.parametrize("attention", ["auto", "sdpa", "reference", "cpu", "triton"])
def test_every_kind_is_known(attention: str) -> None:
    validate(make(attention=attention))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.attention='flash' is unknown: use one of auto, sdpa, reference"):
        validate(make(attention="flash"))


def test_megatron_has_no_sdpa() -> None:
    validate(make(backend="megatron", attention="cpu"))
    with pytest.raises(
        ConfigError, match=r"trainer\.attention=sdpa is not for trainer\.backend=megatron: set it to auto"
    ):
        validate(make(backend="megatron", attention="sdpa"))
