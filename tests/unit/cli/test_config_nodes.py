"""The keys of node managers and of Ray: what is refused, and how `rollout=ray` composes."""

from __future__ import annotations

from typing import Any

import pytest

from swe_rl.cli.hydra_entry import compose_config
from swe_rl.config import PhaseConfig, TrainConfig, validate
from swe_rl.errors import ConfigError


def make(**overrides: Any) -> TrainConfig:
    return TrainConfig(phases=[PhaseConfig(name="rl", data="rollouts", steps=2, overrides=overrides)])


@pytest.mark.parametrize(
    ("group", "key", "value", "words"),
    [
        ("sandbox", "grading_concurrency", -1, "sandbox.grading_concurrency must be 0 or more"),
        ("sandbox", "node_memory_mib", -1, "sandbox.node_memory_mib must be 0 or more"),
        ("sandbox", "warm", -1, "sandbox.warm must be 0 or more"),
        ("sandbox", "daemon_calls", 0, "sandbox.daemon_calls must be positive"),
        ("sandbox", "daemon_calls", 4, "sandbox.daemon_calls=4 does nothing for sandbox.backend=local"),
        ("rollout", "backend", "slurm", "rollout.backend='slurm' is unknown: use one of local, ray"),
        ("rollout", "ray_address", "auto", "rollout.ray_address=auto does nothing for rollout.backend=local"),
    ],
)
def test_what_would_do_nothing_is_refused(group: str, key: str, value: Any, words: str) -> None:
    cfg = make()
    setattr(getattr(cfg, group), key, value)
    with pytest.raises(ConfigError) as caught:
        validate(cfg)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [("rollout", "backend", "ray"), ("sandbox", "warm", 3), ("sandbox", "grading_concurrency", 3)],
)
def test_a_phase_cannot_change_what_a_node_has_one_of(group: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"phases\.rl\.overrides\.{group}\.{key} cannot take effect"):
        validate(make(**{group: {key: value}}))


def test_ray_is_chosen_by_one_word() -> None:
    assert compose_config(TrainConfig, "train", []).rollout.backend == "local"
    cfg = compose_config(TrainConfig, "train", ["experiment=smoke", "rollout=ray", "rollout.ray_address=auto"])
    validate(cfg)
    assert (cfg.rollout.backend, cfg.rollout.group_size) == ("ray", 4)
