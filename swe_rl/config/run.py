"""The whole tree of `swe-rl train`, the overrides of phases, and the checks between groups."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from swe_rl.config import agent, algo, cluster, model, rollout, sandbox, tasks, trainer, verifier
from swe_rl.config.agent import AgentConfig, validate_agent
from swe_rl.config.algo import AlgoConfig, validate_algo, validate_rl
from swe_rl.config.bounds import Bounds
from swe_rl.config.cluster import ClusterConfig, validate_cluster
from swe_rl.config.model import ModelConfig, validate_model
from swe_rl.config.phase import PHASE_GROUPS, PhaseConfig, expand_rounds, validate_phase, validate_pools
from swe_rl.config.rollout import (
    EngineConfig,
    RolloutConfig,
    validate_adapters,
    validate_engine,
    validate_replay,
    validate_rollout,
    validate_stall,
)
from swe_rl.config.sandbox import SandboxConfig, validate_sandbox
from swe_rl.config.tasks import RewardConfig, TaskConfig, validate_game, validate_reward
from swe_rl.config.trainer import BatchingConfig, TrainerConfig, validate_trainer
from swe_rl.config.verifier import VerifierConfig, validate_verifier
from swe_rl.errors import ConfigError


@dataclass(kw_only=True)
class EvalConfig:
    splits: dict[str, int] = field(default_factory=dict)  # held-out split -> number of tasks
    greedy_tasks: int = 128  # at most so many tasks per split get one greedy attempt as well; 0: none
    samples_per_task: int = 1  # at temperature 1
    base_tasks: int = 32  # tasks per split for the row "base" (an untrained policy rambles, so few); 0: no such row
    every: int = 0  # RL steps between evaluations that run beside the rollouts; 0: only after phases
    every_tasks: int = 32  # tasks per split of such a one; 0: all


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
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    phases: list[PhaseConfig] = field(default_factory=list)
    seed: int = 0
    run_dir: str = ""  # empty: runs/<date>-<experiment>; under torchrun rank 0 names it
    resume: bool = False
    checkpoint_every: int = 5  # optimiser steps
    # Training goes on while a checkpoint is written, from a copy in host memory; the next one waits for it, and so does
    # the end of a phase.
    async_checkpoints: bool = False
    keep_checkpoints: int = 2
    init_weights: str = ""  # a directory written by a phase (phases/<name>): start from its weights
    threads: int = 0  # torch threads; 0 leaves torch's choice


PHASE_MODEL_KEYS = ("dtype", *model.YARN_KEYS)  # of a model that stays the same otherwise
BOUNDS: dict[str, Bounds] = {  # of every group; "" is the root itself
    "model": model.BOUNDS,
    "task": tasks.TASK_BOUNDS,
    "sandbox": sandbox.BOUNDS,
    "agent": agent.BOUNDS,
    "engine": rollout.ENGINE_BOUNDS,
    "rollout": rollout.ROLLOUT_BOUNDS,
    "algo": algo.BOUNDS,
    "reward": tasks.REWARD_BOUNDS,
    "batching": trainer.BATCHING_BOUNDS,
    "trainer": trainer.BOUNDS,
    "cluster": cluster.BOUNDS,
    "eval": Bounds(positive=("samples_per_task",), not_negative=("greedy_tasks", "base_tasks", "every", "every_tasks")),
    "verifier": verifier.BOUNDS,
    "": Bounds(positive=("checkpoint_every", "keep_checkpoints"), not_negative=("threads",)),
}


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
        raise ConfigError("phases is empty: choose an experiment, for example experiment=quickstart")
    names = [phase.name for phase in expand_rounds(cfg.phases)]
    if len(set(names)) != len(names):
        raise ConfigError(f"phases: every phase needs its own name, got {', '.join(names)}")
    validate_groups(cfg)
    _validate_every(cfg)
    for split, count in cfg.eval.splits.items():
        if count <= 0:
            raise ConfigError(f"eval.splits.{split} must be positive, got {count}: leave the split out instead")
    validate_pools(cfg.phases)
    for phase in cfg.phases:
        validate_phase(phase, cfg.task)
        _validate_fixed(cfg, phase)
        changed = phase_config(cfg, phase)
        validate_groups(changed)
        if phase.data == "rollouts":
            validate_rl(changed.algo, changed.rollout)


def _validate_every(cfg: TrainConfig) -> None:
    """Evaluations beside the rollouts: that there are rollouts, and tasks to play."""
    every, tasks = cfg.eval.every, cfg.eval.every_tasks
    if not every and tasks != EvalConfig.every_tasks:
        raise ConfigError(f"eval.every_tasks={tasks} does nothing with eval.every=0: set that, or remove it")
    if every and not cfg.eval.splits:
        raise ConfigError(f"eval.every={every} needs tasks to play: add eval.splits.heldout=128, or set it to 0")
    if every and all(phase.data != "rollouts" or phase.steps < every + phase.evaluate for phase in cfg.phases):
        raise ConfigError(f"eval.every={every} does nothing: no phase with data=rollouts has more steps than that")


def validate_groups(cfg: TrainConfig) -> None:
    """The checks within groups and between them, phases left out. ConfigError names the key and the cure."""
    for name, bounds in BOUNDS.items():
        bounds.check(getattr(cfg, name) if name else cfg, name)
    validate_algo(cfg.algo)
    validate_agent(cfg.agent)
    validate_reward(cfg.reward, cfg.task, advantage=cfg.algo.advantage)
    validate_game(cfg.task, cfg.agent)
    _validate_limits(cfg)
    validate_engine(cfg.engine)
    validate_stall(cfg.engine, cfg.agent)
    validate_adapters(cfg.engine, cfg.model)
    validate_replay(cfg.engine, cfg.batching, cfg.trainer)
    validate_rollout(cfg.rollout, cfg.engine)
    validate_sandbox(cfg.sandbox)
    validate_trainer(cfg.trainer)
    validate_cluster(cfg.cluster)
    validate_verifier(cfg.verifier)
    validate_model(cfg.model, max_context_tokens=cfg.agent.max_context_tokens)


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


def _validate_fixed(cfg: TrainConfig, phase: PhaseConfig) -> None:
    """Overrides may only touch what a phase reads anew."""
    changed, where = phase_config(cfg, phase), f"phases.{phase.name}.overrides"
    for group in phase.overrides:
        kept = {key: getattr(cfg.model, key) for key in PHASE_MODEL_KEYS}
        same_model = group == "model" and replace(changed.model, **kept) == cfg.model
        if group not in PHASE_GROUPS and not same_model:
            raise ConfigError(
                f"{where}.{group} cannot take effect: a phase may change {', '.join(PHASE_GROUPS)} and "
                f"{', '.join(f'model.{key}' for key in PHASE_MODEL_KEYS)}; set {group} for the whole run"
            )
    for key in ("thinking", "observations"):  # one renderer for the run
        if getattr(changed.agent, key) != getattr(cfg.agent, key):
            raise ConfigError(f"{where}.agent.{key} cannot take effect: set agent.{key} for the whole run")
    built_in = trainer.MEGATRON_FIXED_KEYS if cfg.trainer.backend == "megatron" else ()
    for key in (*trainer.FIXED_KEYS, *built_in):
        if getattr(changed.trainer, key) != getattr(cfg.trainer, key):
            raise ConfigError(f"{where}.trainer.{key} cannot take effect: set trainer.{key} for the whole run")
    for key in ("backend", "ray_address"):
        if getattr(changed.rollout, key) != getattr(cfg.rollout, key):
            raise ConfigError(f"{where}.rollout.{key} cannot take effect: set rollout.{key} for the whole run")
    for key in ("grading_concurrency", "node_memory_mib", "warm", "daemon_calls"):  # of the one pool of a node
        if getattr(changed.sandbox, key) != getattr(cfg.sandbox, key):
            raise ConfigError(f"{where}.sandbox.{key} cannot take effect: set sandbox.{key} for the whole run")
    if cfg.trainer.fsdp and changed.model.dtype != cfg.model.dtype:
        raise ConfigError(f"{where}.model.dtype cannot change with trainer.fsdp: set it for the whole run")
    if changed.agent.max_context_tokens > cfg.agent.max_context_tokens:
        raise ConfigError(
            f"{where}.agent.max_context_tokens={changed.agent.max_context_tokens} is more than the engine holds: "
            f"raise agent.max_context_tokens={cfg.agent.max_context_tokens} for the whole run"
        )
