"""The keys of the group `cluster`: how many machines a recipe was made for."""

from __future__ import annotations

from dataclasses import dataclass

from swe_rl.config.bounds import Bounds
from swe_rl.errors import ConfigError


@dataclass(kw_only=True)
class ClusterConfig:
    """0 takes what torchrun started; other numbers are checked against it, so that a recipe runs as it was meant."""

    num_nodes: int = 0
    gpus_per_node: int = 0  # one training process each
    gpu: str = ""  # a100 (80 GB) | h100 | h200: what `swe-rl plan` calculates with


BOUNDS = Bounds(choices={"gpu": ("", "a100", "h100", "h200")}, not_negative=("num_nodes", "gpus_per_node"))


def validate_cluster(cfg: ClusterConfig) -> None:
    """Both numbers or none, and no GPU without them. ConfigError names the key and the cure."""
    if bool(cfg.num_nodes) != bool(cfg.gpus_per_node):
        raise ConfigError(
            f"cluster.num_nodes={cfg.num_nodes} and cluster.gpus_per_node={cfg.gpus_per_node}: set both, or none"
        )
    if cfg.gpu and not cfg.num_nodes:
        raise ConfigError(f"cluster.gpu={cfg.gpu} does nothing without cluster.num_nodes: set that, or remove it")
