"""What trainer.backend=megatron refuses before anything is read or written."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from real_parts import require

from swe_rl.cli import preflight
from swe_rl.config import PhaseConfig, TrainConfig
from swe_rl.errors import ConfigError


def make(**trainer: Any) -> TrainConfig:
    cfg = TrainConfig()
    cfg.trainer.backend = "megatron"
    for key, value in trainer.items():
        setattr(cfg.trainer, key, value)
    cfg.phases = [PhaseConfig(name="rl", data="rollouts", steps=1, tasks_per_step=8)]
    return cfg


@pytest.fixture
def there() -> None:
    require(importlib.util.find_spec("megatron") is not None, "package megatron-core (pip install 'swe-rl[megatron]')")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs megatron-core: pip install 'swe-rl\[megatron\]'"):
        preflight.check_backends(make())


@pytest.mark.usefixtures("there")
def test_adapters_and_value_heads() -> None:
    preflight.check_backends(make())
    cfg = make()
    cfg.model.lora_rank = 4
    with pytest.raises(ConfigError, match=r"model\.lora_rank=4: trainer\.backend=megatron trains whole weights"):
        preflight.check_backends(cfg)
    cfg = make()
    cfg.phases[0].overrides = {"algo": {"advantage": "gae"}}
    with pytest.raises(ConfigError, match=r"phases\.rl: algo\.advantage=gae needs a value head"):
        preflight.check_backends(cfg)


def test_processes_that_are_no_multiple_of_a_copy() -> None:
    preflight.check_counts(make(tensor_parallel=2), num_tasks=8, world_size=4)
    with pytest.raises(ConfigError, match="take 4 processes for one copy of the model, which do not divide the 6"):
        preflight.check_counts(make(tensor_parallel=2, pipeline_parallel=2), num_tasks=8, world_size=6)
