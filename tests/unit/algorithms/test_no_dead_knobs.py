"""Every key of algo/ changes the optimiser step, or is refused: no knob is without effect.

The step is that of a tiny model on recorded rollouts, two passes long, so that ratios move: the walk changes one key at
a time, from a configuration in which that key can act.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from episodes import episode, group_of

from swe_rl.config import AgentConfig, AlgoConfig, ModelConfig, PhaseConfig, RolloutConfig, TrainConfig, TrainerConfig
from swe_rl.config.algo import ACTS_WITH, BOUNDS, validate_algo, validate_rl
from swe_rl.config.stop_presets import untested_reasons
from swe_rl.errors import ConfigError
from swe_rl.models.nano import build_model
from swe_rl.sample_streams import with_credit
from swe_rl.training.rollout_scores import needs_scores, rollout_scores
from swe_rl.training.step_batches import optimizer_steps, packed_step
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import StopReason, Trajectory, TrajectoryGroup

VOCAB = 40
MODEL = ModelConfig(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16, vocab_size=VOCAB, init_seed=0
)
PHASE = PhaseConfig(name="rl", data="rollouts", steps=1)
BASE: dict[str, Any] = {"epochs": 2}
# key -> (another value, what must hold for it to act)
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "advantage": ("group_std", {}),
    "singleton": ("reward", {}),
    "negative_scale": (0.5, {}),
    "permute_advantages": (True, {}),
    "gamma": (0.8, {"advantage": "gae"}),
    "gae_lambda": (0.5, {"advantage": "gae", "epochs": 3}),
    "value_coeff": (5.0, {"advantage": "gae", "value_trunk_grad": True}),
    "value_learning_rate": (0.1, {"advantage": "gae"}),
    "value_trunk_grad": (True, {"advantage": "gae"}),
    "ratio_rule": ("cispo", {}),
    "clip_low": (0.001, {}),
    "clip_high": (0.001, {}),
    "dual_clip": (1.0001, {"old_policy": "rollout"}),
    "old_policy": ("rollout", {}),
    "correction": ("tis", {}),
    "correction_low": (0.9, {"correction": "mask"}),
    "correction_cap": (1.01, {"correction": "tis"}),
    "count_rejected": (False, {"correction": "geometric_mask", "correction_low": 0.8, "correction_cap": 1.3}),
    "epochs": (3, {}),
    "aggregation": ("token_mean", {}),
    "normalizer_tokens": (7, {}),
    "kl_coeff": (0.5, {"epochs": 3}),
    "kl_estimator": ("k2", {"kl_coeff": 5.0, "epochs": 3}),
    "kl_in": ("reward", {"kl_coeff": 0.5, "epochs": 3}),
    "entropy_coeff": (0.1, {}),
    "drop_uniform_groups": (True, {}),
    "refill_rounds": (1, {"drop_uniform_groups": True}),
    "uniform_by": ("reward", {"drop_uniform_groups": True, "length_penalty": "turns", "length_penalty_end": 8}),
    "length_penalty": ("tokens", {"length_penalty": "turns", "length_penalty_end": 8}),
    "length_penalty_start": (2, {"length_penalty": "turns", "length_penalty_end": 8}),
    "length_penalty_end": (5, {"length_penalty": "turns", "length_penalty_end": 8}),
    "length_penalty_scale": (0.5, {"length_penalty": "turns", "length_penalty_end": 8}),
    "length_penalty_on": ("advantage", {"length_penalty": "turns", "length_penalty_end": 8}),
    "stop_preset": ("keep_all", {}),
    "stop_reasons": ({"max_turns": "drop"}, {}),
    "run_tests_on_filtered": (False, {}),
}
OUTSIDE_THE_STEP = {  # these act on which rollouts there are: their own tests are elsewhere
    "refill_rounds": "tests/unit/rollout/test_dynamic_sampling.py",
}


@cache
def recorded() -> list[TrajectoryGroup]:
    """Groups with a success and a failure, with equal rewards, with an over-long one that would pass, and a lonely
    one."""
    rng = random.Random(3)

    def make(
        name: str, reward: float | None, turns: int, group: str, stop: StopReason = StopReason.SUBMITTED
    ) -> Trajectory:
        sampled = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 5))] for _ in range(turns)]
        parts = [([rng.randrange(VOCAB) for _ in range(2)], ids) for ids in sampled]
        logprobs = [[-rng.uniform(2.5, 5.0) for _ in ids] for ids in sampled]
        return episode(name, reward, parts, group=group, stop=stop, logprobs=logprobs)

    over_long = make("a2", 1.0, 6, "a", StopReason.MAX_TURNS)
    return [
        group_of(make("a0", 1.0, 3, "a"), make("a1", 0.0, 2, "a"), over_long, name="a"),
        group_of(make("b0", 1.0, 1, "b"), make("b1", 1.0, 4, "b"), name="b"),
        group_of(make("c0", 1.0, 2, "c"), make("c1", None, 1, "c", StopReason.INFRA_ERROR), name="c"),
    ]


def graded(groups: Sequence[TrajectoryGroup], algo: AlgoConfig) -> list[TrajectoryGroup]:
    """What the collector would hand over: untested endings have reward 0."""
    skipped = untested_reasons(algo)

    def seen(t: Trajectory) -> Trajectory:
        return replace(t, reward=replace(t.reward, value=0.0)) if t.reward and t.stop_reason in skipped else t

    return [replace(group, trajectories=[seen(t) for t in group.trajectories]) for group in groups]


def trained_weights(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Parameters after one iteration, the value head's among them. ConfigError when the settings are refused."""
    algo = AlgoConfig(**settings)
    cfg = TrainConfig(algo=algo, agent=AgentConfig(max_context_tokens=64), rollout=RolloutConfig(group_size=3))
    validate_algo(algo)
    validate_rl(algo, cfg.rollout)
    torch.set_num_threads(1)
    backend = TorchBackend(build_model(MODEL), TrainerConfig(learning_rate=1e-2, max_grad_norm=1e9), algo=algo)
    score = (lambda found: rollout_scores(found, cfg, backend=backend)) if needs_scores(cfg) else None
    samples = with_credit(graded(recorded(), algo), algo, step=0, seed=0, score=score).samples
    for part in optimizer_steps(samples, PHASE, cfg, step=0, backend=backend).parts:
        backend.train_step(packed_step(part, PHASE, cfg, backend=backend), learning_rate=1e-2)
    found = {name: value.clone() for name, value in backend.weights().items()}
    if backend.policy.value_head is not None:
        found |= {name: value.detach().clone() for name, value in backend.policy.value_head.named_parameters()}
    return found


@cache
def base_weights(frozen: tuple[tuple[str, Any], ...]) -> dict[str, torch.Tensor]:
    return trained_weights(dict(frozen))


def test_every_key_is_walked() -> None:
    assert set(CHANGES) == {field.name for field in fields(AlgoConfig)}


@pytest.mark.parametrize("key", [key for key in CHANGES if key not in OUTSIDE_THE_STEP])
def test_changing_one_key_changes_the_step(key: str) -> None:
    value, needed = CHANGES[key]
    start = {**BASE, **needed}
    assert start.get(key, getattr(AlgoConfig(), key)) != value
    before, after = base_weights(tuple(start.items())), trained_weights({**start, key: value})
    assert set(before) <= set(after)
    assert any(not torch.equal(before[name], after[name]) for name in before), f"algo.{key}={value} did nothing"


@pytest.mark.parametrize("key", ACTS_WITH)
def test_a_key_that_cannot_act_is_refused(key: str) -> None:
    switch, values = ACTS_WITH[key]
    off = next(value for value in BOUNDS.choices.get(switch, (False,)) if value not in values)
    with pytest.raises(ConfigError, match=rf"algo\.{key}=.* does nothing with algo\.{switch}={off}, only with"):
        validate_algo(AlgoConfig(**{switch: off, key: CHANGES[key][0]}))


@pytest.mark.parametrize("key", ["kl_estimator", "kl_in"])
def test_the_kind_of_kl_without_kl_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"algo\.{key}=.* does nothing with algo\.kl_coeff=0"):
        validate_algo(AlgoConfig(**{key: CHANGES[key][0]}))
