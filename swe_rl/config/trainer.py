"""The keys of the groups `batching` and `trainer`."""

from __future__ import annotations

from dataclasses import dataclass, field

from swe_rl.config.bounds import Bounds
from swe_rl.errors import ConfigError


@dataclass(kw_only=True)
class BatchingConfig:
    max_tokens_per_batch: int = 4096  # tokens of a packed row (PackedBatch), however many processes share it
    # sequence (samples one by one) | tree (what samples share is computed once) | auto (whichever takes less time by
    # the cost model of batching/layout.py)
    layout: str = "sequence"


@dataclass(kw_only=True)
class TrainerConfig:
    backend: str = "torch"  # torch (FSDP2) | megatron
    optimizer: str = "adamw"  # adamw | muon (matrices by Muon, the rest by AdamW)
    learning_rate: float = 1e-4
    muon_learning_rate: float = 0.02  # for matrices when optimizer=muon
    warmup_steps: int = 0
    warmup_ratio: float = 0.0  # instead: this share of the phase's steps
    schedule: str = "constant"  # constant | cosine
    min_lr_ratio: float = 0.1  # end of the cosine
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    activation_checkpointing: bool = False
    fsdp: bool = False  # shard over all torchrun ranks; without it the ranks replicate
    head_impl: str = "auto"  # of ops.linear_policy_loss: auto | reference | cpu | triton
    # Of the trainer's attention: sdpa (torch's, each document alone; torch backend only) | reference | cpu | triton (of
    # ops.attention, trees too) | auto (sdpa for plain documents on a CPU, otherwise the best of ops.attention)
    attention: str = "auto"
    # So many processes compute a packed row together, each a part of its tokens; the others are data parallel. A row of
    # at most batching.max_tokens_per_batch / context_parallel tokens is computed by one alone (backend=torch)
    context_parallel: int = 1
    # backend=torch: how queries meet the keys of other processes: gather (all at once, within a node) | ring (part by
    # part, between nodes) | heads (all rows of some heads; as many as the model's divide)
    context_scheme: str = "gather"
    # Only for backend=megatron; data parallelism is what these and context_parallel leave of the processes:
    tensor_parallel: int = 1  # with sequence parallelism
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1  # parts of the model on each pipeline rank, by turns (interleaved): smaller bubbles
    expert_parallel: int = 1  # experts are spread over so many of the data and context parallel ranks
    offload: bool = False  # optimiser state and masters in host memory


MEGATRON_KEYS = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel", "offload")
MIN_INTERLEAVED = 3  # pipeline ranks: megatron-core does not tell apart what two of them send one another both ways
TORCH_KEYS = ("fsdp", "head_impl", "context_scheme")
FIXED_KEYS = ("backend", "fsdp", "context_parallel", "context_scheme", *MEGATRON_KEYS)  # the same in all phases
MEGATRON_FIXED_KEYS = ("attention", "activation_checkpointing")  # as well: its layers are built with them
BATCHING_BOUNDS = Bounds(choices={"layout": ("sequence", "tree", "auto")}, positive=("max_tokens_per_batch",))
BOUNDS = Bounds(
    choices={
        "backend": ("torch", "megatron"),
        "head_impl": ("auto", "reference", "cpu", "triton"),
        "attention": ("auto", "sdpa", "reference", "cpu", "triton"),
        "context_scheme": ("gather", "ring", "heads"),
        "optimizer": ("adamw", "muon"),
        "schedule": ("constant", "cosine"),
    },
    positive=(
        *("learning_rate", "muon_learning_rate", "eps", "max_grad_norm"),
        *("tensor_parallel", "context_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel"),
    ),
    not_negative=("warmup_steps", "warmup_ratio", "min_lr_ratio", "weight_decay"),
    at_most_one=("min_lr_ratio", "warmup_ratio"),
)


def validate_trainer(cfg: TrainerConfig) -> None:
    """Combinations that the trainer cannot run. ConfigError names the key and the cure."""
    if len(cfg.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.betas):
        raise ConfigError(f"trainer.betas={list(cfg.betas)} must be two numbers of at least 0 and below 1")
    if cfg.warmup_steps and cfg.warmup_ratio:
        raise ConfigError(
            f"trainer.warmup_steps={cfg.warmup_steps} and trainer.warmup_ratio={cfg.warmup_ratio} exclude one another: "
            "set one of them to 0"
        )
    keys = TORCH_KEYS if cfg.backend == "megatron" else MEGATRON_KEYS
    for key in keys:
        if getattr(cfg, key) != getattr(TrainerConfig, key):
            raise ConfigError(f"trainer.{key} does nothing for trainer.backend={cfg.backend}: remove it")
    if cfg.context_parallel == 1 and cfg.context_scheme != TrainerConfig.context_scheme:
        raise ConfigError("trainer.context_scheme does nothing with trainer.context_parallel=1: remove it, or set that")
    if cfg.context_parallel > 1 and cfg.attention != "auto":
        raise ConfigError(
            f"trainer.attention={cfg.attention} does nothing for rows split by trainer.context_parallel="
            f"{cfg.context_parallel}: set it to auto"
        )
    if cfg.backend == "megatron" and cfg.attention == "sdpa":
        raise ConfigError("trainer.attention=sdpa is not for trainer.backend=megatron: set it to auto")
    if cfg.virtual_pipeline > 1 and cfg.pipeline_parallel < MIN_INTERLEAVED:
        raise ConfigError(
            f"trainer.virtual_pipeline={cfg.virtual_pipeline} needs trainer.pipeline_parallel of at least "
            f"{MIN_INTERLEAVED}, it is {cfg.pipeline_parallel}: raise it, or set trainer.virtual_pipeline=1"
        )
    if cfg.backend == "megatron" and cfg.optimizer != "adamw":
        raise ConfigError(f"trainer.optimizer={cfg.optimizer} is not for trainer.backend=megatron: set it to adamw")
    if cfg.optimizer == "muon" and cfg.fsdp:
        raise ConfigError(
            "trainer.optimizer=muon needs whole matrices: set trainer.fsdp=false or trainer.optimizer=adamw"
        )


def check_context(cfg: TrainerConfig, *, world_size: int) -> None:
    """Raises ConfigError unless the training processes fall into whole context groups."""
    if world_size % cfg.context_parallel:
        raise ConfigError(
            f"trainer.context_parallel={cfg.context_parallel} does not divide the number of training processes, "
            f"{world_size}: start a multiple of it with torchrun, or set it to 1"
        )
