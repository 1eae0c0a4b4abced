"""Every configuration key of the system, with its default and unit, and the cross-checks between keys.

conf/*.yaml hold differences from these defaults only. A component receives its own dataclass, never the whole tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

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
    heldout_seed: int = 1_000_003  # of the held-out tasks; nothing is ever tuned on them


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
    lease_s: float = 600.0
    infra_retries: int = 2  # fresh sandboxes tried before a sample leaves its group


@dataclass(kw_only=True)
class AgentConfig:
    prompt: str = "nano"  # a prompt of swe_rl/agents/prompts: nano | default
    action_format: str = "xml"
    max_turns: int = 8
    max_context_tokens: int = 512  # prompt + everything after it
    max_turn_tokens: int = 160  # sampled tokens per turn
    max_observation_tokens: int = 128  # head and tail kept
    max_format_errors: int = 3  # in a row
    episode_s: float = 300.0


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
    recipe: str = "grpo_pp"  # label in logs; the ingredients below are what acts
    advantage: str = "leave_one_out"  # leave_one_out | group_mean | group_std
    permute_advantages: bool = False  # control experiment: shuffles advantages over the batch
    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy_coeff: float = 0.0
    correction: str = "none"  # of the trainer/engine mismatch: none | tis (token-level truncated importance sampling)
    correction_cap: float = 2.0  # tis: largest weight of a token
    aggregation: str = (
        "seq_sum_const"  # token_mean | seq_mean | seq_sum_const (divided by max_context_tokens and batch rows)
    )
    drop_uniform_groups: bool = False
    # stop reason -> keep | mask | drop; reasons not named are kept. infra_error and cancelled always leave the group.
    stop_reasons: dict[str, str] = field(
        default_factory=lambda: {"max_turns": "mask", "max_tokens": "mask", "context_limit": "mask", "timeout": "mask"}
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
    backend: str = "torch"
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
    "agent.prompt": ("nano", "default"),
    "agent.action_format": ("xml",),
    "engine.dtype": ("float32", "bfloat16"),
    "algo.advantage": ("leave_one_out", "group_mean", "group_std"),
    "algo.aggregation": ("token_mean", "seq_mean", "seq_sum_const"),
    "algo.correction": ("none", "tis"),
    "trainer.backend": ("torch",),
    "trainer.optimizer": ("adamw", "muon"),
    "trainer.schedule": ("constant", "cosine"),
}
PHASE_GROUPS = ("sandbox", "agent", "rollout", "algo", "reward", "batching", "trainer")
PHASE_DATA = ("demonstrations", "passed_rollouts", "rollouts")
POSITIVE = (
    "sandbox.concurrency",
    "agent.max_turns",
    "agent.max_turn_tokens",
    "engine.num_slots",
    "engine.prefill_chunk",
    "rollout.group_size",
    "batching.max_tokens_per_batch",
    "trainer.learning_rate",
    "checkpoint_every",
    "keep_checkpoints",
)


def phase_config(cfg: TrainConfig, phase: PhaseConfig) -> TrainConfig:
    """`cfg` with the overrides of one phase applied; ConfigError for an unknown key or a wrong type."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cfg), phase.overrides)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as err:
        reason = str(err).splitlines()[0]
        raise ConfigError(f"phases: overrides of phase {phase.name!r} do not fit the schema: {reason}") from err


def _validate_fixed(cfg: TrainConfig, phase: PhaseConfig) -> None:
    """Overrides may only touch what a phase reads anew."""
    changed = phase_config(cfg, phase)
    for group in phase.overrides:
        same_model = group == "model" and replace(changed.model, dtype=cfg.model.dtype) == cfg.model
        if group not in PHASE_GROUPS and not same_model:
            raise ConfigError(
                f"phases.{phase.name}.overrides.{group} cannot take effect: a phase may change "
                f"{', '.join(PHASE_GROUPS)} and model.dtype; set {group} for the whole run"
            )


def validate(cfg: TrainConfig) -> None:
    """Cross-checks of the whole tree and of every phase. ConfigError names the key and the cure."""
    if not cfg.phases:
        raise ConfigError("phases is empty: choose an experiment, for example experiment=nano_minirepo")
    names = [phase.name for phase in cfg.phases]
    if len(set(names)) != len(names):
        raise ConfigError(f"phases: every phase needs its own name, got {', '.join(names)}")
    _validate_groups(cfg)
    for phase in cfg.phases:
        _validate_phase(phase)
        _validate_fixed(cfg, phase)
        _validate_groups(phase_config(cfg, phase))
        if phase.data == "rollouts":
            _validate_rl(phase_config(cfg, phase))


def _validate_groups(cfg: TrainConfig) -> None:
    for key, allowed in CHOICES.items():
        value = _lookup(cfg, key)
        if value not in allowed:
            raise ConfigError(f"{key}={value!r} is unknown: use one of {', '.join(allowed)}")
    for key in POSITIVE:
        if _lookup(cfg, key) <= 0:
            raise ConfigError(f"{key} must be positive, got {_lookup(cfg, key)}")
    for reason, action in cfg.algo.stop_reasons.items():
        if reason not in {str(r) for r in StopReason}:
            raise ConfigError(f"algo.stop_reasons.{reason} is no stop reason: use one of {', '.join(StopReason)}")
        if action not in ("keep", "mask", "drop"):
            raise ConfigError(f"algo.stop_reasons.{reason}={action!r} is unknown: use keep, mask or drop")
    if cfg.agent.max_turn_tokens >= cfg.agent.max_context_tokens:
        raise ConfigError(
            f"agent.max_turn_tokens ({cfg.agent.max_turn_tokens}) must be smaller than "
            f"agent.max_context_tokens ({cfg.agent.max_context_tokens})"
        )
    if cfg.rollout.max_staleness < 0:
        raise ConfigError(f"rollout.max_staleness must be 0 (synchronous) or more, got {cfg.rollout.max_staleness}")
    if cfg.trainer.optimizer == "muon" and cfg.trainer.fsdp:
        raise ConfigError(
            "trainer.optimizer=muon needs whole matrices: set trainer.fsdp=false or trainer.optimizer=adamw"
        )


def _validate_phase(phase: PhaseConfig) -> None:
    if phase.data not in PHASE_DATA:
        raise ConfigError(f"phases.{phase.name}.data={phase.data!r} is unknown: use one of {', '.join(PHASE_DATA)}")
    if phase.data == "rollouts" and phase.steps <= 0:
        raise ConfigError(f"phases.{phase.name}.steps must be positive for data=rollouts, got {phase.steps}")
    for key in ("tasks_per_step", "num_tasks", "samples_per_task", "batch_size", "epochs"):
        if getattr(phase, key) <= 0:
            raise ConfigError(f"phases.{phase.name}.{key} must be positive, got {getattr(phase, key)}")
    if phase.cache and phase.data != "demonstrations":
        raise ConfigError(f"phases.{phase.name}.cache works for data=demonstrations only: rollouts depend on the run")


def _validate_rl(cfg: TrainConfig) -> None:
    if cfg.algo.advantage == "leave_one_out" and cfg.rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size={cfg.rollout.group_size} leaves nobody for algo.advantage=leave_one_out: "
            "set rollout.group_size to 2 or more"
        )
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for key, value in neutral.items():
        if getattr(cfg.rollout, key) != value:
            raise ConfigError(
                f"rollout.{key}={getattr(cfg.rollout, key)} cuts the distribution that the loss assumes: "
                f"set rollout.{key}={value} for policy-gradient phases"
            )
    if cfg.rollout.temperature <= 0:
        raise ConfigError(
            f"rollout.temperature must be positive in a policy-gradient phase, got {cfg.rollout.temperature}"
        )


def _lookup(cfg: TrainConfig, key: str) -> Any:
    value: Any = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value
