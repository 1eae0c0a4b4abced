"""`swe-rl rft`: rejection fine-tuning alone. k rollouts per task, those that pass are imitated, evaluation before and
after; the same loop as `swe-rl train`, with the recipe conf/experiment/rft.yaml."""

from __future__ import annotations

from collections.abc import Sequence

from swe_rl.cli.hydra_entry import hydra_main
from swe_rl.cli.train import run_training
from swe_rl.config import TrainConfig, validate
from swe_rl.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code."""
    return hydra_main(
        argv, command="rft", schema=TrainConfig, config_name="rft", run=run_training, validate=validate_rft
    )


def validate_rft(cfg: TrainConfig) -> None:
    """As for training, and: there is a policy to sample from, and nothing but supervised phases."""
    validate(cfg)
    for phase in cfg.phases:
        if phase.data == "rollouts":
            raise ConfigError(f"phases.{phase.name}.data=rollouts is reinforcement learning: use swe-rl train")
    if not any(phase.data == "passed_rollouts" for phase in cfg.phases):
        raise ConfigError("phases: none has data=passed_rollouts: choose experiment=rft, or use swe-rl train")
    if cfg.model.name == "nano" and not cfg.init_weights and cfg.phases[0].data != "demonstrations":
        raise ConfigError(
            "init_weights is empty and model.name=nano knows nothing, so nothing would pass: add "
            "init_weights=RUN/phases/warm_start of a run of swe-rl train"
        )
