"""config.validate: every cross-check names its key, and what it allows stays allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from swe_rl.cli.hydra_entry import compose_config
from swe_rl.config import PhaseConfig, TrainConfig, validate
from swe_rl.config.run import BOUNDS
from swe_rl.config.stop_presets import stop_map
from swe_rl.errors import ConfigError
from swe_rl.types import StopReason

POSITIVE = [f"{group}.{key}".lstrip(".") for group, bounds in BOUNDS.items() for key in bounds.positive]
NOT_NEGATIVE = [f"{group}.{key}".lstrip(".") for group, bounds in BOUNDS.items() for key in bounds.not_negative]
RL = {"name": "rl", "data": "rollouts", "steps": 2}
RFT = {"name": "rft", "data": "passed_rollouts"}
DEMO = {"name": "warm", "data": "demonstrations"}


def make(*phases: dict[str, Any]) -> TrainConfig:
    return TrainConfig(phases=[PhaseConfig(**phase) for phase in phases or (RL,)])


def put(cfg: TrainConfig, key: str, value: Any) -> TrainConfig:
    """Sets one key; "phases.0.x" reaches into the list."""
    *path, last = key.split(".")
    target: Any = cfg
    for part in path:
        target = target[int(part)] if part.isdigit() else getattr(target, part)
    if isinstance(target, dict):
        target[last] = value
    else:
        setattr(target, last, value)
    return cfg


def refusal(cfg: TrainConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(cfg)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.dtype", "float16", "model.dtype='float16' is unknown"),
        ("sandbox.backend", "chroot", "sandbox.backend"),
        ("sandbox.isolation", "chroot", "sandbox.isolation"),
        ("agent.prompt", "mine", "agent.prompt"),
        ("agent.action_format", "json", "agent.action_format"),
        ("engine.dtype", "int8", "engine.dtype"),
        ("algo.advantage", "td", "algo.advantage"),
        ("algo.aggregation", "sum", "algo.aggregation"),
        ("algo.correction", "mis", "algo.correction"),
        ("trainer.optimizer", "sgd", "trainer.optimizer"),
        ("trainer.schedule", "linear", "trainer.schedule"),
        ("trainer.betas", [0.9], "trainer.betas=[0.9] must be two numbers"),
        ("trainer.betas", [0.9, 1.0], "trainer.betas"),
        ("trainer.betas", [math.nan, 0.9], "trainer.betas"),
        ("trainer.min_lr_ratio", 1.5, "trainer.min_lr_ratio must be between 0 and 1"),
        ("algo.clip_low", 1.1, "algo.clip_low must be between 0 and 1"),
        ("algo.stop_reasons.tired", "mask", "algo.stop_reasons.tired is no stop reason"),
        ("algo.stop_reasons.timeout", "zero", "algo.stop_reasons.timeout='zero' is unknown"),
        ("algo.stop_reasons.infra_error", "keep", "algo.stop_reasons.infra_error='keep': an outage always leaves"),
        ("algo.stop_reasons.cancelled", "mask", "algo.stop_reasons.cancelled='mask': an outage always leaves"),
        ("agent.max_turn_tokens", 512, "agent.max_turn_tokens (512) must be smaller than agent.max_context_tokens"),
        ("sandbox.lease_s", 1.0, "sandbox.lease_s=1 ends a sandbox that is in use: set it to at least agent.episode_s"),
        ("sandbox.lease_s", 319.9, "sandbox.lease_s"),
        ("agent.episode_s", 581.0, "agent.episode_s + sandbox.command_s = 601"),
        ("reward.grade_s", 590.0, "reward.grade_s + sandbox.command_s = 610"),
        ("rollout.top_k", 5, "rollout.top_k=5 cuts the distribution"),
        ("rollout.top_p", 0.9, "rollout.top_p=0.9 cuts the distribution"),
        ("rollout.min_p", 0.1, "rollout.min_p=0.1 cuts the distribution"),
        ("rollout.temperature", 0.0, "rollout.temperature must be positive in a policy-gradient phase"),
        ("rollout.group_size", 1, "rollout.group_size=1 leaves nobody"),
        ("eval.splits.heldout", 0, "eval.splits.heldout must be positive"),
        ("phases", [], "phases is empty: choose an experiment"),
        ("phases.0.name", "base", "'base' is no name for a phase"),
        ("phases.0.name", "a/b", "'a/b' is no name for a phase"),
        ("phases.0.data", "dreams", "phases.rl.data='dreams' is unknown"),
        ("phases.0.steps", 0, "phases.rl.steps must be positive"),
        ("phases.0.tasks_per_step", 0, "phases.rl.tasks_per_step must be positive"),
        ("phases.0.tasks_per_step", 401, "phases.rl.tasks_per_step=401 is more than task.num_train=400"),
        ("phases.0.p_right", 0.5, "phases.rl.p_right does nothing for data=rollouts, only for demonstrations"),
        ("phases.0.cache", True, "phases.rl.cache does nothing for data=rollouts"),
        ("phases.0.epochs", 2, "phases.rl.epochs does nothing for data=rollouts"),
        ("phases.0.overrides", {"trainer": {"fsdp": True}}, "phases.rl.overrides.trainer.fsdp cannot take effect"),
        ("phases.0.overrides", {"engine": {"num_slots": 2}}, "phases.rl.overrides.engine cannot take effect"),
        ("phases.0.overrides", {"model": {"num_layers": 2}}, "phases.rl.overrides.model cannot take effect"),
        ("phases.0.overrides", {"agent": {"max_context_tokens": 513}}, "phases.rl.overrides.agent.max_context_tokens"),
        ("phases.0.overrides", {"sandbox": {"lease_s": 5}}, "sandbox.lease_s=5"),
        ("phases.0.overrides", {"algo": {"clip": 1}}, "overrides of phase 'rl' do not fit the schema"),
        ("phases.0.overrides", {"rollout": {"group_size": 1}}, "rollout.group_size=1 leaves nobody"),
    ],
)
def test_a_value_that_cannot_work_is_refused(key: str, value: Any, words: str) -> None:
    assert words in refusal(put(make(), key, value))


@pytest.mark.parametrize("key", POSITIVE)
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_what_must_be_positive_is(key: str, value: float) -> None:
    assert f"{key} must be positive" in refusal(put(make(), key, value))


@pytest.mark.parametrize("key", NOT_NEGATIVE)
def test_what_must_not_be_negative_is_not(key: str) -> None:
    assert f"{key} must be 0 or more" in refusal(put(make(), key, -1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer.optimizer": "muon", "trainer.fsdp": True}, "trainer.optimizer=muon needs whole matrices"),
        ({"algo.correction": "tis", "rollout.max_staleness": 1}, "algo.correction=tis does nothing with"),
        (
            {"trainer.fsdp": True, "phases.0.overrides": {"model": {"dtype": "bfloat16"}}},
            "overrides.model.dtype cannot change with trainer.fsdp",
        ),
    ],
)
def test_keys_that_exclude_one_another(changes: dict[str, Any], words: str) -> None:
    cfg = make()
    for key, value in changes.items():
        put(cfg, key, value)
    assert words in refusal(cfg)


@pytest.mark.parametrize(
    ("phase", "key", "value", "words"),
    [
        (DEMO, "p_right", 1.1, "phases.warm.p_right must be between 0 and 1"),
        (DEMO, "p_give_up", -0.1, "phases.warm.p_give_up must be between 0 and 1"),
        (DEMO, "steps", 3, "phases.warm.steps does nothing for data=demonstrations, only for rollouts"),
        (DEMO, "num_tasks", 401, "phases.warm.num_tasks=401 is more than task.num_train=400"),
        (DEMO, "batch_size", 0, "phases.warm.batch_size must be positive"),
        (DEMO, "samples_per_task", 0, "phases.warm.samples_per_task must be positive"),
        (DEMO, "epochs", -1, "phases.warm.epochs must be positive"),
        (RFT, "p_give_up", 0.1, "phases.rft.p_give_up does nothing for data=passed_rollouts"),
        (RFT, "tasks_per_step", 3, "phases.rft.tasks_per_step does nothing for data=passed_rollouts"),
        (RFT, "cache", True, "phases.rft.cache does nothing for data=passed_rollouts"),
    ],
)
def test_keys_of_supervised_phases(phase: dict[str, Any], key: str, value: Any, words: str) -> None:
    assert words in refusal(make({**phase, key: value}))


@pytest.mark.parametrize("key", ["p_right", "p_give_up"])
def test_the_imperfect_demonstrator_exists_for_one_source_only(key: str) -> None:
    cfg = put(make({**DEMO, key: 0.5}), "task.source", "data/pypi")
    assert f"phases.warm.{key} does nothing for task.source=data/pypi" in refusal(cfg)


def test_truncation_is_refused_without_a_policy_gradient_phase_too() -> None:
    assert "rollout.top_p=0.9" in refusal(put(make(RFT), "rollout.top_p", 0.9))


def test_two_phases_of_one_name_are_refused() -> None:
    assert "phases: every phase needs its own name, got rl, rl" in refusal(make(RL, RL))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.max_grad_norm", math.inf),
        ("task.num_train", 0),  # all that the source has: how many is not known yet
        ("sandbox.lease_s", 320.0),
        ("algo.stop_reasons.infra_error", "drop"),
        ("phases.0.overrides", {"agent": {"max_context_tokens": 400}, "model": {"dtype": "bfloat16"}}),
    ],
)
def test_edges_that_are_fine(key: str, value: Any) -> None:
    validate(put(make(), key, value))


def test_time_limits_of_the_machine_never_count_as_the_agents_failure() -> None:
    """Published GRPO keeps every row; the default masks whatever a wall clock ended."""
    limits = {StopReason.TIMEOUT, StopReason.ENV_TIMEOUT}
    assert {stop_map(TrainConfig().algo)[reason] for reason in limits} == {"mask"}
    assert stop_map(compose_config(TrainConfig, "train", ["algo=grpo"]).algo) == {}
