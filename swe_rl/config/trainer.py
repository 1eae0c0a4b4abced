"""The keys of the groups `batching` and `trainer`."""

from __future__ import annotations

from dataclasses import dataclass, field

from swe_rl.config.bounds import Bounds
from swe_rl.errors import ConfigError


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


BATCHING_BOUNDS = Bounds(positive=("max_tokens_per_batch",))
BOUNDS = Bounds(
    choices={
        "head_impl": ("auto", "reference", "cpu", "triton"),
        "optimizer": ("adamw", "muon"),
        "schedule": ("constant", "cosine"),
    },
    positive=("learning_rate", "muon_learning_rate", "eps", "max_grad_norm"),
    not_negative=("warmup_steps", "min_lr_ratio", "weight_decay"),
    at_most_one=("min_lr_ratio",),
)


def validate_trainer(cfg: TrainerConfig) -> None:
    """Combinations that the trainer cannot run. ConfigError names the key and the cure."""
    if len(cfg.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.betas):
        raise ConfigError(f"trainer.betas={list(cfg.betas)} must be two numbers of at least 0 and below 1")
    if cfg.optimizer == "muon" and cfg.fsdp:
        raise ConfigError(
            "trainer.optimizer=muon needs whole matrices: set trainer.fsdp=false or trainer.optimizer=adamw"
        )
