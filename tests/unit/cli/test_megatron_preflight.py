"""What trainer.backend=megatron refuses before anything is read or written."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from real_parts import require

from swe_rl.cli import build, preflight
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


@pytest.mark.parametrize(
    ("backend", "before", "wanted"), [("megatron", None, "1"), ("megatron", "8", "8"), ("torch", None, None)]
)
async def test_the_environment_is_set_before_a_gpu_is_used(
    monkeypatch: pytest.MonkeyPatch, backend: str, before: str | None, wanted: str | None
) -> None:
    """CUDA reads the variable once. What opens the device, and whatever might ask for one earlier, finds it set."""
    name, seen = "CUDA_DEVICE_MAX_CONNECTIONS", []

    class Enough(Exception):
        pass

    def asked() -> bool:
        seen.append(os.environ.get(name))
        raise Enough

    monkeypatch.setenv(name, "0")  # so that it is what it was when the test is over
    monkeypatch.delenv(name) if before is None else monkeypatch.setenv(name, before)
    monkeypatch.setattr(torch.cuda, "is_available", asked)
    monkeypatch.setattr(build, "check_backends", lambda cfg: None)  # megatron-core need not be here
    cfg = make()
    cfg.trainer.backend = backend
    with pytest.raises(Enough):
        async with build.open_run(cfg, label="", config_yaml=""):
            pass
    assert seen == [wanted]
