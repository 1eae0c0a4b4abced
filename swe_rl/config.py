"""Every configuration key of the system (group `agent`: agent_config.py), its default and unit, and cross-checks.

conf/*.yaml hold differences from these defaults only. A component receives its own dataclass, never the whole tree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from swe_rl.agent_config import PROMPTS, AgentConfig, validate_agent
from swe_rl.errors import ConfigError
from swe_rl.types import StopReason


@dataclass(kw_only=True)
class ModelConfig:
    name: str = "nano"  # "nano", a local Hugging Face directory, "smollm2-135m", or a hub name
    dtype: str = "float32"  # of the forward pass: float32 | bfloat16; master weights are always fp32
    # Only for name=nano (Qwen3 architecture, built deterministically from `init_seed`):
    hidden_size: int = 192
    num_layers: int = 3
    num_heads: int = 8
    num_kv_heads: int = 4
    intermediate_size: int = 512
    vocab_size: int = 1024
    init_seed: int = 0


@dataclass(kw_only=True)
class TaskConfig:
    source: str = "minirepo"  # "minirepo", or a directory written by `swe-rl tasks build`
    num_train: int = 400  # distinct training tasks; 0 takes all that the source has
    seed: int = 0  # of the training tasks
    heldout_seed: int = 4_000_037  # of the held-out tasks; nothing is ever tuned on them


@dataclass(kw_only=True)
class SandboxConfig:
    backend: str = "local"  # local
    isolation: str = "namespaces"  # namespaces | none (trusted code only; grading then runs unprotected)
    concurrency: int = 16  # sandboxes alive at a time in this process
    command_s: float = 20.0
    memory_mib: int = 512
    pids: int = 64
    disk_mib: int = 64
    output_kib: int = 16
    lease_s: float = 600.0  # after this a sandbox ends by itself: at least agent.episode_s + command_s
    infra_retries: int = 2  # fresh sandboxes tried before a sample leaves its group


@dataclass(kw_only=True)
class EngineConfig:
    num_slots: int = 32  # episodes decoded together; the decode shape is fixed to it
    prefill_chunk: int = 64  # tokens per prefill call; fixed shape
    dtype: str = "float32"


@dataclass(kw_only=True)
class RolloutConfig:
    group_size: int = 8
    temperature: float = 1.0
    top_k: int = 0  # RL needs the full distribution: anything but 0, 1.0, 0.0 in these three is refused
    top_p: float = 1.0
    min_p: float = 0.0
    max_staleness: int = 0  # optimiser steps a rollout may lag behind; 0 is synchronous


@dataclass(kw_only=True)
class AlgoConfig:
    advantage: str = "leave_one_out"  # leave_one_out | group_mean | group_std
    permute_advantages: bool = False  # control experiment: shuffles advantages over the batch
    # The clip acts on stale rollouts only: with rollout.max_staleness=0 each batch gets one optimiser step, so the old
    # policy is the current one and every ratio is exactly 1.
    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy_coeff: float = 0.0
    # Of the trainer/engine mismatch: none | tis (token-level truncated importance sampling; for max_staleness=0 only:
    # the ratio of stale rollouts is taken against the engine's logprobs already).
    correction: str = "none"
    correction_cap: float = 2.0  # tis: largest weight of a token
    aggregation: str = (
        "seq_sum_const"  # token_mean | seq_mean | seq_sum_const (divided by max_context_tokens and batch rows)
    )
    drop_uniform_groups: bool = False
    # stop reason -> keep | mask | drop; reasons not named are kept. infra_error and cancelled always leave the group.
    stop_reasons: dict[str, str] = field(
        default_factory=lambda: {
            "max_turns": "mask",
            "max_tokens": "mask",
            "context_limit": "mask",
            "timeout": "mask",
            "env_timeout": "mask",
        }
    )


@dataclass(kw_only=True)
class RewardConfig:
    grade_s: float = 60.0  # limit of one hidden-test run
    max_patch_bytes: int = 1 << 20
    grade_retries: int = 2  # after infrastructure trouble, each in a fresh sandbox


@dataclass(kw_only=True)
class BatchingConfig:
    max_tokens_per_batch: int = 4096  # packed tokens of one micro-batch (PackedBatch)


@dataclass(kw_only=True)
class TrainerConfig:
    optimizer: str = "adamw"  # adamw | muon (matrices by Muon, the rest by AdamW)
    learning_rate: float = 1e-4
    muon_learning_rate: float = 0.02  # for matrices when optimizer=muon
    warmup_steps: int = 0
    schedule: str = "constant"  # constant | cosine
    min_lr_ratio: float = 0.1  # end of the cosine
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    activation_checkpointing: bool = False
    fsdp: bool = False  # shard over all torchrun ranks; without it the ranks replicate
    head_impl: str = "auto"  # of ops.linear_policy_loss: auto | reference | cpu | triton


@dataclass(kw_only=True)
class PhaseConfig:
    """One link of the chain. `data` says where training samples come from, `overrides` change any other group."""

    name: str = MISSING
    data: str = "rollouts"  # demonstrations | passed_rollouts | rollouts
    steps: int = 0  # rollouts: optimiser steps; the other two derive them from epochs
    tasks_per_step: int = 12  # rollouts: groups per step over all ranks
    num_tasks: int = 64  # demonstrations, passed_rollouts: tasks used once at the start
    samples_per_task: int = 4  # demonstrations, passed_rollouts: attempts per task
    batch_size: int = 32  # demonstrations, passed_rollouts: trajectories per optimiser step over all ranks
    epochs: int = 1  # demonstrations, passed_rollouts
    # demonstrations: so many optimiser steps see the first turn only, the first two, ...; then whole trajectories.
    # Short ones first teach a small model to copy names from its context within a minute instead of ten.
    turn_curriculum: list[int] = field(default_factory=list)
    p_right: float = 1.0  # demonstrations: chance that an edit is right; 1 is the oracle
    p_give_up: float = 0.7  # demonstrations: chance to submit after a failed test
    cache: bool = False  # demonstrations: keep the trained weights under the cache directory and reuse them
    evaluate: bool = True  # held-out evaluation after the phase
    overrides: dict[str, Any] = field(default_factory=dict)  # of any group, nested as in this file


@dataclass(kw_only=True)
class EvalConfig:
    splits: dict[str, int] = field(default_factory=dict)  # held-out split -> number of tasks
    greedy_tasks: int = 128  # at most so many tasks per split get one greedy attempt as well; 0: none
    samples_per_task: int = 1  # at temperature 1
    base_tasks: int = 32  # tasks per split for the row "base" (an untrained policy rambles, so few); 0: no such row


@dataclass(kw_only=True)
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    phases: list[PhaseConfig] = field(default_factory=list)
    seed: int = 0
    run_dir: str = ""  # empty: runs/<date>-<experiment>; under torchrun rank 0 names it
    resume: bool = False
    checkpoint_every: int = 5  # optimiser steps
    keep_checkpoints: int = 2
    init_weights: str = ""  # a directory written by a phase (phases/<name>): start from its weights
    threads: int = 0  # torch threads; 0 leaves torch's choice


CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("float32", "bfloat16"),
    "sandbox.backend": ("local",),
    "sandbox.isolation": ("namespaces", "none"),
    "agent.toolset": ("minimal", "r2e", "nebius", "sweagent", "bash"),
    "agent.ask_human": ("off", "scripted", "terminal"),
    "agent.prompt": tuple(PROMPTS),
    "agent.action_format": ("xml", "hermes", "fence"),
    "agent.thinking": ("accumulated", "kept", "stripped", "off"),
    "agent.observations": ("user", "tool"),
    "engine.dtype": ("float32", "bfloat16"),
    "algo.advantage": ("leave_one_out", "group_mean", "group_std"),
    "algo.aggregation": ("token_mean", "seq_mean", "seq_sum_const"),
    "algo.correction": ("none", "tis"),
    "trainer.head_impl": ("auto", "reference", "cpu", "triton"),
    "trainer.optimizer": ("adamw", "muon"),
    "trainer.schedule": ("constant", "cosine"),
}
STOP_ACTIONS = ("keep", "mask", "drop")
PHASE_GROUPS = ("sandbox", "agent", "rollout", "algo", "reward", "batching", "trainer")
PHASE_DATA = ("demonstrations", "passed_rollouts", "rollouts")
PHASE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")  # part of file names and of metric tags
SUPERVISED = ("demonstrations", "passed_rollouts")
ACTS_IN: dict[str, tuple[str, ...]] = {  # key of a phase -> the data with which it means something
    "steps": ("rollouts",),
    "tasks_per_step": ("rollouts",),
    "num_tasks": SUPERVISED,
    "samples_per_task": SUPERVISED,
    "batch_size": SUPERVISED,
    "epochs": SUPERVISED,
    "turn_curriculum": SUPERVISED,
    "p_right": ("demonstrations",),
    "p_give_up": ("demonstrations",),
    "cache": ("demonstrations",),
}
POSITIVE = (
    *(f"model.{key}" for key in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")),
    *(f"sandbox.{key}" for key in ("concurrency", "command_s", "memory_mib", "pids", "disk_mib", "output_kib")),
    *(f"agent.max_{key}" for key in ("turns", "context_tokens", "turn_tokens", "observation_tokens", "format_errors")),
    "agent.episode_s",
    "engine.num_slots",
    "engine.prefill_chunk",
    "rollout.group_size",
    "rollout.top_p",
    "algo.correction_cap",
    "reward.grade_s",
    "reward.max_patch_bytes",
    "batching.max_tokens_per_batch",
    "trainer.learning_rate",
    "trainer.muon_learning_rate",
    "trainer.eps",
    "trainer.max_grad_norm",
    "eval.samples_per_task",
    "checkpoint_every",
    "keep_checkpoints",
)
NOT_NEGATIVE = (
    "task.num_train",
    "sandbox.infra_retries",
    "rollout.temperature",
    "rollout.max_staleness",
    *(f"agent.{key}" for key in ("question_cost", "soft_turns", "remind_turns", "max_generated_tokens")),
    *(f"agent.{key}" for key in ("remind_tokens", "keep_observations", "drop_from_tokens", "tool_s")),
    "algo.clip_low",
    "algo.clip_high",
    "reward.grade_retries",
    "trainer.warmup_steps",
    "trainer.min_lr_ratio",
    "trainer.weight_decay",
    "eval.greedy_tasks",
    "eval.base_tasks",
    "threads",
)
AT_MOST_ONE = ("algo.clip_low", "trainer.min_lr_ratio")
UNCUT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # of rollout: the distribution that loss and evaluation assume


def phase_config(cfg: TrainConfig, phase: PhaseConfig) -> TrainConfig:
    """`cfg` with the overrides of one phase applied; ConfigError for an unknown key or a wrong type."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cfg), phase.overrides)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as err:
        reason = str(err).splitlines()[0]
        raise ConfigError(f"phases: overrides of phase {phase.name!r} do not fit the schema: {reason}") from err


def validate(cfg: TrainConfig) -> None:
    """Cross-checks of the whole tree and of every phase. ConfigError names the key and the cure."""
    if not cfg.phases:
        raise ConfigError("phases is empty: choose an experiment, for example experiment=nano_minirepo")
    names = [phase.name for phase in cfg.phases]
    if len(set(names)) != len(names):
        raise ConfigError(f"phases: every phase needs its own name, got {', '.join(names)}")
    _validate_groups(cfg)
    for split, count in cfg.eval.splits.items():
        if count <= 0:
            raise ConfigError(f"eval.splits.{split} must be positive, got {count}: leave the split out instead")
    for phase in cfg.phases:
        _validate_phase(phase, cfg)
        _validate_fixed(cfg, phase)
        changed = phase_config(cfg, phase)
        _validate_groups(changed)
        if phase.data == "rollouts":
            _validate_rl(changed)


def _validate_groups(cfg: TrainConfig) -> None:
    for key, allowed in CHOICES.items():
        if _lookup(cfg, key) not in allowed:
            raise ConfigError(f"{key}={_lookup(cfg, key)!r} is unknown: use one of {', '.join(allowed)}")
    for key in POSITIVE:  # written so that NaN is refused as well
        if not _lookup(cfg, key) > 0:
            raise ConfigError(f"{key} must be positive, got {_lookup(cfg, key)}")
    for key in NOT_NEGATIVE:
        if not _lookup(cfg, key) >= 0:
            raise ConfigError(f"{key} must be 0 or more, got {_lookup(cfg, key)}")
    for key in AT_MOST_ONE:
        if not _lookup(cfg, key) <= 1:
            raise ConfigError(f"{key} must be between 0 and 1, got {_lookup(cfg, key)}")
    _validate_stop_reasons(cfg.algo.stop_reasons)
    validate_agent(cfg.agent)
    _validate_limits(cfg)
    _validate_rollout(cfg.rollout)
    _validate_trainer(cfg.trainer)


def _validate_stop_reasons(stop_reasons: dict[str, str]) -> None:
    for reason, action in stop_reasons.items():
        if reason not in {str(r) for r in StopReason}:
            raise ConfigError(f"algo.stop_reasons.{reason} is no stop reason: use one of {', '.join(StopReason)}")
        if action not in STOP_ACTIONS:
            raise ConfigError(f"algo.stop_reasons.{reason}={action!r} is unknown: use one of {', '.join(STOP_ACTIONS)}")
        if StopReason(reason).is_infra and action != "drop":
            raise ConfigError(f"algo.stop_reasons.{reason}={action!r}: an outage always leaves its group; use drop")


def _validate_limits(cfg: TrainConfig) -> None:
    """Limits that contain one another."""
    if cfg.agent.max_turn_tokens >= cfg.agent.max_context_tokens:
        raise ConfigError(
            f"agent.max_turn_tokens ({cfg.agent.max_turn_tokens}) must be smaller than "
            f"agent.max_context_tokens ({cfg.agent.max_context_tokens})"
        )
    for key, longest in (("agent.episode_s", cfg.agent.episode_s), ("reward.grade_s", cfg.reward.grade_s)):
        if not cfg.sandbox.lease_s >= longest + cfg.sandbox.command_s:
            raise ConfigError(
                f"sandbox.lease_s={cfg.sandbox.lease_s:g} ends a sandbox that is in use: set it to at least "
                f"{key} + sandbox.command_s = {longest + cfg.sandbox.command_s:g}"
            )


def _validate_rollout(cfg: RolloutConfig) -> None:
    for key, value in UNCUT.items():
        if getattr(cfg, key) != value:
            raise ConfigError(
                f"rollout.{key}={getattr(cfg, key)} cuts the distribution that the loss assumes: "
                f"set rollout.{key}={value}"
            )


def _validate_trainer(cfg: TrainerConfig) -> None:
    if len(cfg.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.betas):
        raise ConfigError(f"trainer.betas={list(cfg.betas)} must be two numbers of at least 0 and below 1")
    if cfg.optimizer == "muon" and cfg.fsdp:
        raise ConfigError(
            "trainer.optimizer=muon needs whole matrices: set trainer.fsdp=false or trainer.optimizer=adamw"
        )


def _validate_phase(phase: PhaseConfig, cfg: TrainConfig) -> None:
    """The keys of the phase itself; `cfg` is that of the whole run."""
    here, default = f"phases.{phase.name}", PhaseConfig(name=phase.name)
    if not PHASE_NAME.fullmatch(phase.name) or phase.name == "base":  # "base" is the row of the untrained policy
        raise ConfigError(
            f"phases: {phase.name!r} is no name for a phase: use letters, digits, _ and -, and not 'base'"
        )
    if phase.data not in PHASE_DATA:
        raise ConfigError(f"{here}.data={phase.data!r} is unknown: use one of {', '.join(PHASE_DATA)}")
    for key, data in ACTS_IN.items():
        if phase.data not in data and getattr(phase, key) != getattr(default, key):
            raise ConfigError(
                f"{here}.{key} does nothing for data={phase.data}, only for {' and '.join(data)}: remove it"
            )
    if phase.data == "rollouts" and phase.steps <= 0:
        raise ConfigError(f"{here}.steps must be positive for data=rollouts, got {phase.steps}")
    for key in ("tasks_per_step", "num_tasks", "samples_per_task", "batch_size", "epochs"):
        if getattr(phase, key) <= 0:
            raise ConfigError(f"{here}.{key} must be positive, got {getattr(phase, key)}")
    if any(length <= 0 for length in phase.turn_curriculum):
        raise ConfigError(f"{here}.turn_curriculum={list(phase.turn_curriculum)} must hold positive numbers of steps")
    for key in ("p_right", "p_give_up"):
        if not 0 <= getattr(phase, key) <= 1:
            raise ConfigError(f"{here}.{key} must be between 0 and 1, got {getattr(phase, key)}")
        if cfg.task.source != "minirepo" and getattr(phase, key) != getattr(default, key):
            raise ConfigError(
                f"{here}.{key} does nothing for task.source={cfg.task.source}, only for minirepo: remove it"
            )
    key = "tasks_per_step" if phase.data == "rollouts" else "num_tasks"
    if 0 < cfg.task.num_train < getattr(phase, key):
        raise ConfigError(
            f"{here}.{key}={getattr(phase, key)} is more than task.num_train={cfg.task.num_train}: raise that"
        )


def _validate_fixed(cfg: TrainConfig, phase: PhaseConfig) -> None:
    """Overrides may only touch what a phase reads anew."""
    changed, where = phase_config(cfg, phase), f"phases.{phase.name}.overrides"
    for group in phase.overrides:
        same_model = group == "model" and replace(changed.model, dtype=cfg.model.dtype) == cfg.model
        if group not in PHASE_GROUPS and not same_model:
            raise ConfigError(
                f"{where}.{group} cannot take effect: a phase may change "
                f"{', '.join(PHASE_GROUPS)} and model.dtype; set {group} for the whole run"
            )
    for key in ("thinking", "observations"):  # one renderer for the run
        if getattr(changed.agent, key) != getattr(cfg.agent, key):
            raise ConfigError(f"{where}.agent.{key} cannot take effect: set agent.{key} for the whole run")
    if changed.trainer.fsdp != cfg.trainer.fsdp:
        raise ConfigError(f"{where}.trainer.fsdp cannot take effect: set trainer.fsdp for the whole run")
    if cfg.trainer.fsdp and changed.model.dtype != cfg.model.dtype:
        raise ConfigError(f"{where}.model.dtype cannot change with trainer.fsdp: set it for the whole run")
    if changed.agent.max_context_tokens > cfg.agent.max_context_tokens:
        raise ConfigError(
            f"{where}.agent.max_context_tokens={changed.agent.max_context_tokens} is more than the engine holds: "
            f"raise agent.max_context_tokens={cfg.agent.max_context_tokens} for the whole run"
        )


def _validate_rl(cfg: TrainConfig) -> None:
    if cfg.algo.advantage == "leave_one_out" and cfg.rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size={cfg.rollout.group_size} leaves nobody for algo.advantage=leave_one_out: "
            "set rollout.group_size to 2 or more"
        )
    if cfg.rollout.temperature <= 0:
        raise ConfigError(
            f"rollout.temperature must be positive in a policy-gradient phase, got {cfg.rollout.temperature}"
        )
    if cfg.algo.correction != "none" and cfg.rollout.max_staleness > 0:
        raise ConfigError(
            f"algo.correction={cfg.algo.correction} does nothing with rollout.max_staleness="
            f"{cfg.rollout.max_staleness}: the ratio is taken against the engine's logprobs already; "
            "set algo.correction=none"
        )


def _lookup(cfg: TrainConfig, key: str) -> Any:
    value: Any = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value
