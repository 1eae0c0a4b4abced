"""The keys of the group `algo`: credit, loss and what each ending of an episode means for training."""

from __future__ import annotations

from dataclasses import dataclass, field

from swe_rl.config.bounds import Bounds
from swe_rl.config.rollout import RolloutConfig
from swe_rl.errors import ConfigError
from swe_rl.types import StopReason


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


BOUNDS = Bounds(
    choices={
        "advantage": ("leave_one_out", "group_mean", "group_std"),
        "aggregation": ("token_mean", "seq_mean", "seq_sum_const"),
        "correction": ("none", "tis"),
    },
    positive=("correction_cap",),
    not_negative=("clip_low", "clip_high"),
    at_most_one=("clip_low",),
)
STOP_ACTIONS = ("keep", "mask", "drop")


def validate_stop_reasons(stop_reasons: dict[str, str]) -> None:
    """Each names a StopReason and what is done with it; an outage is always dropped. ConfigError names the entry."""
    for reason, action in stop_reasons.items():
        if reason not in {str(r) for r in StopReason}:
            raise ConfigError(f"algo.stop_reasons.{reason} is no stop reason: use one of {', '.join(StopReason)}")
        if action not in STOP_ACTIONS:
            raise ConfigError(f"algo.stop_reasons.{reason}={action!r} is unknown: use one of {', '.join(STOP_ACTIONS)}")
        if StopReason(reason).is_infra and action != "drop":
            raise ConfigError(f"algo.stop_reasons.{reason}={action!r}: an outage always leaves its group; use drop")


def validate_rl(algo: AlgoConfig, rollout: RolloutConfig) -> None:
    """Of a policy-gradient phase. ConfigError names the key and the cure."""
    if algo.advantage == "leave_one_out" and rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size={rollout.group_size} leaves nobody for algo.advantage=leave_one_out: "
            "set rollout.group_size to 2 or more"
        )
    if rollout.temperature <= 0:
        raise ConfigError(f"rollout.temperature must be positive in a policy-gradient phase, got {rollout.temperature}")
    if algo.correction != "none" and rollout.max_staleness > 0:
        raise ConfigError(
            f"algo.correction={algo.correction} does nothing with rollout.max_staleness="
            f"{rollout.max_staleness}: the ratio is taken against the engine's logprobs already; "
            "set algo.correction=none"
        )
