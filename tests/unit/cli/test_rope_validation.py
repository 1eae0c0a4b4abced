"""Checks of the keys of YaRN that would do nothing or contradict one another."""

from __future__ import annotations

from typing import Any

import pytest

from swe_rl.config import PhaseConfig, TrainConfig, validate
from swe_rl.errors import ConfigError

YARN = {"yarn_factor": 4.0, "yarn_original_context": 32768}


def make(overrides: dict[str, Any] | None = None, **model: Any) -> TrainConfig:
    cfg = TrainConfig(phases=[PhaseConfig(name="rl", steps=2, overrides={"model": overrides} if overrides else {})])
    for key, value in model.items():
        setattr(cfg.model, key, value)
    return cfg


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"yarn_beta_fast": 16.0}, "model.yarn_beta_fast does nothing without model.yarn_factor"),
        ({"yarn_truncate": False}, "model.yarn_truncate does nothing without model.yarn_factor"),
        ({**YARN, "yarn_mscale": 1.0}, "model.yarn_mscale=1 and model.yarn_mscale_all_dim=0: one alone does nothing"),
        (
            {**YARN, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 1.0, "yarn_attention_factor": 1.2},
            "model.yarn_attention_factor=1.2 and model.yarn_mscale=1 exclude one another",
        ),
        ({**YARN, "yarn_beta_fast": 1.0}, "model.yarn_beta_fast=1 must be more than model.yarn_beta_slow=1"),
        ({**YARN, "yarn_beta_slow": 0.0}, "model.yarn_beta_slow must be positive"),
        ({**YARN, "yarn_attention_factor": -1.0}, "model.yarn_attention_factor must be 0 or more"),
    ],
)
def test_what_does_nothing_is_refused(model: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(make(**model))
    assert words in str(caught.value)


def test_a_phase_may_change_every_key_of_yarn() -> None:
    validate(make({**YARN, "yarn_truncate": False, "yarn_beta_fast": 16.0, "yarn_attention_factor": 1.1}))
    validate(make({"yarn_factor": 2.0}, **YARN))
