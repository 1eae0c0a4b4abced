"""Checks of the keys that the published recipes need: back ends, YaRN, adapters, phases, pools."""

from __future__ import annotations

from typing import Any

import pytest

from swe_rl.config import PhaseConfig, TrainConfig, expand_rounds, validate
from swe_rl.errors import ConfigError
from swe_rl.training.schedule import learning_rate

RL = {"name": "rl", "data": "rollouts", "steps": 2}
RFT = {"name": "rft", "data": "passed_rollouts"}
POOL = {"name": "more", "data": "rollouts", "steps": 2, "pool_from": "rl"}


def make(*phases: dict[str, Any], **changes: dict[str, Any]) -> TrainConfig:
    cfg = TrainConfig(phases=[PhaseConfig(**phase) for phase in phases or (RL,)])
    for group, values in changes.items():
        for key, value in values.items():
            setattr(getattr(cfg, group), key, value)
    return cfg


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (make(engine={"backend": "sglang"}), "engine.backend='sglang' is unknown"),
        (
            make(engine={"tensor_parallel": 2}),
            "engine.tensor_parallel does nothing for engine.backend=embedded, only for",
        ),
        (
            make(engine={"backend": "vllm", "prefill_chunk": 8}),
            "engine.prefill_chunk does nothing for engine.backend=vllm",
        ),
        (make(engine={"gpu_memory": 1.5}), "engine.gpu_memory must be between 0 and 1"),
        (make(trainer={"tensor_parallel": 2}), "trainer.tensor_parallel does nothing for trainer.backend=torch"),
        (make(trainer={"backend": "megatron", "fsdp": True}), "trainer.fsdp does nothing for trainer.backend=megatron"),
        (make(trainer={"backend": "megatron", "optimizer": "muon"}), "trainer.optimizer=muon is not for"),
        (make(trainer={"warmup_steps": 2, "warmup_ratio": 0.1}), "trainer.warmup_steps=2 and trainer.warmup_ratio=0.1"),
        (make(cluster={"num_nodes": 2}), "cluster.num_nodes=2 and cluster.gpus_per_node=0: set both"),
        (make(model={"yarn_factor": 4.0}), "model.yarn_factor=4.0 and model.yarn_original_context=0: set both"),
        (make(model={"yarn_factor": 0.5}), "model.yarn_factor must be 1 or more"),
        (make(model={"yarn_original_context": 64}), "model.yarn_factor=1.0 and model.yarn_original_context=64"),
        (make(model={"yarn_factor": 2.0, "yarn_original_context": 64}), "agent.max_context_tokens=512 is more than"),
        (make(model={"lora_rank": 8}), "model.lora_rank=8 and model.lora_alpha=0: set both"),
        (make({**RL, "minibatch_size": -1}), "phases.rl.minibatch_size must be 0 or more"),
        (make({**RL, "max_success": 0.5}), "phases.rl.max_success=0.5 does nothing without pool_from"),
        (
            make({**RL, "pool_from": "rl"}),
            "phases.rl.pool_from='rl' is no earlier phase with rollouts: use one of none",
        ),
        (
            make(RL, {**POOL, "pool_from": "lr"}),
            "phases.more.pool_from='lr' is no earlier phase with rollouts: use one of rl",
        ),
        (make(RL, {**POOL, "max_success": 0.0}), "phases.more.max_success must be above 0"),
        (make({**RL, "dedupe": "patch"}), "phases.rl.dedupe does nothing for data=rollouts"),
        (make({**RFT, "dedupe": "all"}), "phases.rft.dedupe='all' is unknown: use one of none, sampled, patch"),
        (make({**RFT, "max_per_task": 4}), "phases.rft.max_per_task=4 never acts: there are samples_per_task=4"),
        (make({**RFT, "minibatch_size": 4}), "phases.rft.minibatch_size does nothing for data=passed_rollouts"),
        (make({**RFT, "rounds": 0}), "phases.rft.rounds must be positive"),
        (
            make({**RFT, "rounds": 2}, {**RL, "name": "rft-1"}),
            "every phase needs its own name, got rft-1, rft-2, rft-1",
        ),
        (
            make({**RL, "overrides": {"trainer": {"backend": "megatron"}}}),
            "overrides.trainer.backend cannot take effect",
        ),
        (make({**RL, "overrides": {"model": {"lora_rank": 4}}}), "overrides.model cannot take effect"),
    ],
)
def test_a_value_that_cannot_work_is_refused(cfg: TrainConfig, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(cfg)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "cfg",
    [
        make(RL, POOL),
        make({**RFT, "rounds": 3}, {**POOL, "pool_from": "rft-3"}),
        make({**RFT, "max_per_task": 3, "dedupe": "sampled"}),
        make({**RL, "overrides": {"model": {"yarn_factor": 4.0, "yarn_original_context": 128}}}),
        make(model={"yarn_factor": 4.0, "yarn_original_context": 128}),
        make(engine={"backend": "vllm", "tensor_parallel": 8, "gpu_memory": 0.6}),
        make(trainer={"backend": "megatron", "context_parallel": 8, "offload": True}),
    ],
)
def test_what_fits_together_is_fine(cfg: TrainConfig) -> None:
    validate(cfg)


def test_rounds_are_phases_of_their_own() -> None:
    chain = expand_rounds([PhaseConfig(**RFT, rounds=2, num_tasks=9), PhaseConfig(**RL)])
    assert [phase.name for phase in chain] == ["rft-1", "rft-2", "rl"]
    assert [phase.num_tasks for phase in chain[:2]] == [9, 9]
    assert expand_rounds(chain) == chain


def test_a_share_of_the_steps_warms_up() -> None:
    cfg = make(trainer={"warmup_ratio": 0.05, "learning_rate": 1.0}).trainer
    assert [learning_rate(cfg, step, total_steps=40) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
