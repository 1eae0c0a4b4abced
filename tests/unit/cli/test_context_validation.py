"""Checks of trainer.context_parallel and trainer.context_scheme."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swe_rl.cli.preflight import check_counts
from swe_rl.config import PhaseConfig, TrainConfig, TrainerConfig, check_context, validate
from swe_rl.errors import ConfigError
from swe_rl.training import micro_batches


def make(**trainer: Any) -> TrainConfig:
    cfg = TrainConfig(phases=[PhaseConfig(name="rl", steps=2)])
    for key, value in trainer.items():
        setattr(cfg.trainer, key, value)
    return cfg


@pytest.mark.parametrize("scheme", ["gather", "ring", "heads"])
def test_every_scheme_is_known(scheme: str) -> None:
    validate(make(context_parallel=2, context_scheme=scheme))
    validate(make(context_parallel=4, context_scheme=scheme, fsdp=True, activation_checkpointing=True))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"context_scheme": "star"}, r"trainer\.context_scheme='star' is unknown: use one of gather, ring, heads"),
        ({"context_parallel": 0}, r"trainer\.context_parallel must be positive, got 0"),
        ({"context_scheme": "ring"}, r"trainer\.context_scheme does nothing with trainer\.context_parallel=1"),
        (
            {"context_parallel": 2, "attention": "cpu"},
            r"trainer\.attention=cpu does nothing for rows split by trainer\.context_parallel=2: set it to auto",
        ),
        (
            {"backend": "megatron", "context_parallel": 2, "attention": "cpu"},
            r"trainer\.attention=cpu does nothing for rows split by trainer\.context_parallel=2: set it to auto",
        ),
        (
            {"backend": "megatron", "context_parallel": 2, "context_scheme": "ring"},
            r"trainer\.context_scheme does nothing for trainer\.backend=megatron: remove it",
        ),
        (
            {"context_parallel": 2, "tensor_parallel": 2},
            r"trainer\.tensor_parallel does nothing for trainer\.backend=torch: remove it",
        ),
    ],
)
def test_what_does_nothing_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(make(**keys))


@pytest.mark.parametrize("key", ["context_parallel", "context_scheme"])
def test_a_phase_cannot_change_the_groups(key: str) -> None:
    cfg = make(context_parallel=2)
    cfg.phases[0].overrides = {"trainer": {key: {"context_parallel": 4, "context_scheme": "ring"}[key]}}
    with pytest.raises(ConfigError, match=rf"phases\.rl\.overrides\.trainer\.{key} cannot take effect: set trainer"):
        validate(cfg)


@pytest.mark.parametrize(("key", "value"), [("attention", "cpu"), ("activation_checkpointing", True)])
def test_a_phase_cannot_change_what_megatron_builds_its_layers_with(key: str, value: Any) -> None:
    cfg = make()
    cfg.phases[0].overrides = {"trainer": {key: value}}
    validate(cfg)
    cfg.trainer.backend = "megatron"
    with pytest.raises(ConfigError, match=rf"phases\.rl\.overrides\.trainer\.{key} cannot take effect: set trainer"):
        validate(cfg)


def test_processes_fall_into_whole_groups() -> None:
    check_context(TrainerConfig(context_parallel=2), world_size=6)
    message = r"trainer\.context_parallel=4 does not divide the number of training processes, 6: start a multiple"
    with pytest.raises(ConfigError, match=message):
        check_context(TrainerConfig(context_parallel=4), world_size=6)
    with pytest.raises(ConfigError, match="does not divide the number of training processes, 1"):
        check_counts(make(context_parallel=2), num_tasks=100, world_size=1)


@pytest.mark.parametrize(("heads", "key_heads", "size", "fits"), [(8, 2, 4, True), (6, 3, 4, False), (12, 3, 2, False)])
def test_heads_are_divided_or_refused(
    monkeypatch: pytest.MonkeyPatch, heads: int, key_heads: int, size: int, fits: bool
) -> None:
    monkeypatch.setattr(micro_batches.mesh, "world_size", lambda: size)
    monkeypatch.setattr(micro_batches.mesh, "neighbours", lambda number: f"group of {number}")
    cfg = TrainerConfig(context_parallel=size, context_scheme="heads")
    model = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads)
    if fits:
        opened = micro_batches.open_context(cfg, model)
        assert opened is not None
        assert (opened.group, opened.scheme) == (f"group of {size}", "heads")
        return
    message = rf"trainer\.context_scheme=heads cannot split {heads} query and {key_heads} key-value heads over trainer"
    with pytest.raises(ConfigError, match=message):
        micro_batches.open_context(cfg, model)
