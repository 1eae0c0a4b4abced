"""engine.weight_sync and model.lora_rank: what takes effect is allowed, what does nothing or cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest

from swe_rl.cli.hydra_entry import compose_config
from swe_rl.cli.preflight import check_backends
from swe_rl.config import EngineConfig, ModelConfig, PhaseConfig, TrainConfig, validate
from swe_rl.errors import ConfigError

RL = {"name": "rl", "data": "rollouts", "steps": 2}


def make(*, engine: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **phase: Any) -> TrainConfig:
    return TrainConfig(
        engine=EngineConfig(**engine or {}), model=ModelConfig(**model or {}), phases=[PhaseConfig(**{**RL, **phase})]
    )


def test_deltas_are_of_bf16_weights() -> None:
    validate(make(engine={"weight_sync": "delta", "dtype": "bfloat16"}))
    validate(make(engine={"weight_sync": "full"}))
    with pytest.raises(ConfigError, match=r"engine.weight_sync=delta saves nothing with engine.dtype=float32"):
        validate(make(engine={"weight_sync": "delta"}))
    with pytest.raises(ConfigError, match=r"engine.weight_sync='sparse' is unknown"):
        validate(make(engine={"weight_sync": "sparse"}))


def test_the_key_is_in_every_composed_configuration() -> None:
    overrides = ["experiment=quickstart", "engine.weight_sync=delta", "engine.dtype=bfloat16"]
    cfg = compose_config(TrainConfig, "train", overrides)
    assert (cfg.engine.weight_sync, cfg.engine.dtype) == ("delta", "bfloat16")


LORA = {"lora_rank": 4, "lora_alpha": 8.0}


def test_adapters_can_be_trained() -> None:
    check_backends(make(model=LORA))


def test_adapters_do_not_go_with_whole_weights_of_a_phase() -> None:
    with pytest.raises(ConfigError, match=r"phases.rl.cache"):
        check_backends(make(model=LORA, cache=True))


def test_the_reference_of_a_later_phase_is_not_there_after_a_resume() -> None:
    cfg = make(model=LORA)
    cfg.phases.append(PhaseConfig(name="more", data="rollouts", steps=2, overrides={"algo": {"kl_coeff": 0.1}}))
    with pytest.raises(ConfigError, match=r"the reference of phases\.more"):
        check_backends(cfg)
