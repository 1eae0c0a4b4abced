"""Every configuration key of the system, with its default and unit, and the cross-checks between keys.

conf/*.yaml hold differences from these defaults only. A component receives its own dataclass, never the whole tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from swe_rl.errors import ConfigError


@dataclass(kw_only=True)
class ModelConfig:
    name: str = "nano"  # "nano", a local Hugging Face directory, "smollm2-135m", or a hub name
    dtype: str = "float32"  # of the forward pass: float32 | bfloat16; master weights are always fp32
    # Only for name=nano (Qwen3 architecture, built deterministically from `init_seed`):
    hidden_size: int = 192
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 512
    vocab_size: int = 1024
    init_seed: int = 0


@dataclass(kw_only=True)
class TaskConfig:
    source: str = "minirepo"  # "minirepo", or a directory written by `swe-rl tasks build`
    num_train: int = 400  # distinct training tasks; 0 takes all that the source has
    num_heldout: int = 128  # per held-out split
    eval_splits: list[str] = field(default_factory=lambda: ["heldout", "hard"])
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
    kl_coeff: float = 0.0
    aggregation: str = "seq_sum_const"  # token_mean | seq_mean | seq_sum_const (divided by max_context_tokens and batch rows)
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
    steps: int = 0  # optimiser steps; 0 = one pass (passed_rollouts only)
    tasks_per_step: int = 12  # rollouts: groups per step; passed_rollouts: ignored
    num_tasks: int = 64  # passed_rollouts: tasks sampled once at the start; demonstrations: demonstrations made
    samples_per_task: int = 4  # passed_rollouts
    batch_size: int = 32  # demonstrations, passed_rollouts: trajectories per optimiser step
    epochs: int = 1  # passed_rollouts
    cache: bool = False  # keep the result under the cache directory and reuse it (warm start)
    evaluate: bool = True  # held-out evaluation after the phase
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class EvalConfig:
    greedy: bool = True  # one greedy attempt per task beside the sampled ones
    samples_per_task: int = 1  # at temperature 1
    before_training: bool = True  # row "base" of the final table


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
    init_checkpoint: str = ""  # start from this checkpoint's weights
    threads: int = 0  # torch threads; 0 leaves torch's choice


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value!r} is unknown: use one of {', '.join(allowed)}")
