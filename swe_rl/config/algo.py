"""The keys of the group `algo`: credit, loss and what each ending of an episode means for training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swe_rl.config.bounds import Bounds
from swe_rl.config.rollout import RolloutConfig
from swe_rl.config.stop_presets import STOP_PRESETS, stop_map
from swe_rl.errors import ConfigError
from swe_rl.types import StopReason


@dataclass(kw_only=True)
class AlgoConfig:
    # leave_one_out (RLOO) | group_mean (Dr.GRPO) | group_std (GRPO) | reinforce_pp (group mean, whitened over the
    # trained tokens of the batch) | turn_level (leave-one-out at every state that siblings share) | gae (a value per
    # turn)
    advantage: str = "leave_one_out"
    singleton: str = "zero"  # zero | reward: advantage of a rollout whose siblings were all lost or dropped
    # Factor of negative advantages (arXiv:2506.01347 weighs the two signs apart). 0: only what did better than its
    # siblings trains, which a small policy survives for many more steps on the same rollouts.
    negative_scale: float = 1.0
    permute_advantages: bool = False  # control experiment: shuffles advantages over the batch
    # gae only: discount and lambda per turn; the weight of the value head's loss (against the policy's: AdamW hardly
    # heeds it unless value_trunk_grad), the head's rate, and whether its gradient reaches the model
    gamma: float = 1.0
    gae_lambda: float = 1.0
    value_coeff: float = 0.5
    value_learning_rate: float = 1e-3
    value_trunk_grad: bool = False

    ratio_rule: str = "ppo"  # ppo | cispo | gspo (the ratio of whole sequences) | on_policy (no bound)
    # Bounds of the ratio to the old policy. With one optimiser step per batch and old_policy=recompute the old policy
    # is the current one and every ratio is 1: they act from the second step on, and on the engine's logprobs.
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0  # ppo: bound of the loss where the advantage is negative, above 1; 0 is off
    # recompute (decoupled: by the trainer, before the first step on a batch) | rollout (bypass: the engine's logprobs)
    # | auto: rollout if rollout.max_staleness > 0, else recompute
    old_policy: str = "auto"
    # Of the mismatch old policy / engine: none | tis (min(w, cap) per token) | sequence_tis (min(product, cap)) |
    # mask (w, 0 outside [low, cap]; IcePop) | sequence_mask (product, 0 outside; MIS) | geometric_mask (1, 0 where
    # the geometric mean of w is outside)
    correction: str = "none"
    correction_low: float = 0.5
    correction_cap: float = 2.0
    count_rejected: bool = True  # sequence_mask, geometric_mask: rejected rollouts stay in the denominators
    epochs: int = 1  # passes over each batch; phases.*.minibatch_size cuts a pass into optimiser steps

    # token_mean (DAPO) | seq_mean (GRPO) | seq_sum | seq_sum_const (GRPO++) | sum_const (Dr.GRPO) | turn_mean
    aggregation: str = "seq_sum_const"
    normalizer_tokens: int = 0  # the constant of seq_sum_const and sum_const; 0: agent.max_context_tokens
    # Penalty on the distance to the policy at the start of the phase: k1 | k2 | k3, in the loss | in the reward (summed
    # over a rollout's tokens). In the loss k1 has no gradient on average; in the reward only k1 has that of the KL.
    kl_coeff: float = 0.0
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    entropy_coeff: float = 0.0

    drop_uniform_groups: bool = False  # groups whose members are all the same leave the batch
    uniform_by: str = "worth"  # worth (the reward with length_penalty) | reward (as graded: DAPO): what is the same
    refill_rounds: int = 0  # at most so many times further tasks are sampled in their place
    # Soft penalty of long episodes, in sampled tokens or turns: 0 up to start, then down to -scale at end; added to the
    # reward (before standardising) or to the advantage (after).
    length_penalty: str = "none"  # none | tokens | turns
    length_penalty_start: int = 0
    length_penalty_end: int = 0
    length_penalty_scale: float = 1.0
    length_penalty_on: str = "reward"  # reward | advantage
    stop_preset: str = "compact"  # of config/stop_presets.py
    # stop reason -> keep | mask | drop, over the preset. infra_error and cancelled always leave the group.
    stop_reasons: dict[str, str] = field(default_factory=dict)
    run_tests_on_filtered: bool = True  # false: rollouts that are masked or dropped get the reward 0 untested


GROUP_BASELINES = ("leave_one_out", "turn_level")  # impossible alone
SEQUENCE_CORRECTIONS = ("sequence_tis", "sequence_mask", "geometric_mask")
REJECTING = ("sequence_mask", "geometric_mask")
BOUNDS = Bounds(
    choices={
        "advantage": ("leave_one_out", "group_mean", "group_std", "reinforce_pp", "turn_level", "gae"),
        "aggregation": ("token_mean", "seq_mean", "seq_sum", "seq_sum_const", "sum_const", "turn_mean"),
        "correction": ("none", "tis", "mask", *SEQUENCE_CORRECTIONS),
        "kl_estimator": ("k1", "k2", "k3"),
        "kl_in": ("loss", "reward"),
        "length_penalty": ("none", "tokens", "turns"),
        "length_penalty_on": ("reward", "advantage"),
        "old_policy": ("auto", "recompute", "rollout"),
        "ratio_rule": ("ppo", "cispo", "gspo", "on_policy"),
        "singleton": ("zero", "reward"),
        "stop_preset": tuple(STOP_PRESETS),
        "uniform_by": ("worth", "reward"),
    },
    positive=("correction_cap", "epochs", "value_coeff", "value_learning_rate", "length_penalty_scale"),
    not_negative=(
        *("clip_low", "clip_high", "dual_clip", "correction_low", "kl_coeff", "gamma", "gae_lambda"),
        *("negative_scale", "normalizer_tokens", "refill_rounds", "length_penalty_start", "length_penalty_end"),
    ),
    at_most_one=("clip_low", "gamma", "gae_lambda"),
)
STOP_ACTIONS = ("keep", "mask", "drop")
# key -> (the key that switches it on, the values with which it acts). Set away from its default elsewhere: refused.
ACTS_WITH: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(
        ("gamma", "gae_lambda", "value_coeff", "value_learning_rate", "value_trunk_grad"), ("advantage", ("gae",))
    ),
    "singleton": ("advantage", ("leave_one_out", "group_mean", "group_std", "reinforce_pp", "turn_level")),
    "permute_advantages": ("advantage", ("leave_one_out", "group_mean", "group_std", "reinforce_pp")),
    "clip_low": ("ratio_rule", ("ppo", "cispo", "gspo")),
    "clip_high": ("ratio_rule", ("ppo", "cispo", "gspo")),
    "dual_clip": ("ratio_rule", ("ppo",)),
    "correction_low": ("correction", ("mask", *REJECTING)),
    "correction_cap": ("correction", ("tis", "mask", *SEQUENCE_CORRECTIONS)),
    "count_rejected": ("correction", REJECTING),
    "normalizer_tokens": ("aggregation", ("seq_sum_const", "sum_const")),
    "refill_rounds": ("drop_uniform_groups", (True,)),
    "uniform_by": ("drop_uniform_groups", (True,)),
    **dict.fromkeys(
        ("length_penalty_start", "length_penalty_end", "length_penalty_scale", "length_penalty_on"),
        ("length_penalty", ("tokens", "turns")),
    ),
}


def bypasses(algo: AlgoConfig, rollout: RolloutConfig) -> bool:
    """Whether the engine's logprobs are the old policy."""
    return algo.old_policy == "rollout" or (algo.old_policy == "auto" and rollout.max_staleness > 0)


def validate_algo(algo: AlgoConfig) -> None:
    """Of any phase. ConfigError names the key and the cure."""
    _validate_stop_reasons(algo)
    default = AlgoConfig()
    for key, (switch, values) in ACTS_WITH.items():
        if getattr(algo, switch) not in values and getattr(algo, key) != getattr(default, key):
            allowed = " or ".join(str(value) for value in values)
            raise ConfigError(
                f"algo.{key}={getattr(algo, key)} does nothing with algo.{switch}={getattr(algo, switch)}, only with "
                f"{allowed}: set that, or leave algo.{key} at {getattr(default, key)}"
            )
    for key in ("kl_estimator", "kl_in"):
        if not algo.kl_coeff and getattr(algo, key) != getattr(default, key):
            raise ConfigError(f"algo.{key}={getattr(algo, key)} does nothing with algo.kl_coeff=0: set that")
    if algo.singleton == "reward" and algo.drop_uniform_groups:
        raise ConfigError(
            "algo.singleton=reward does nothing with algo.drop_uniform_groups=true: a group of one is uniform and "
            "leaves the batch; set algo.singleton=zero, or algo.drop_uniform_groups=false"
        )
    if algo.dual_clip and algo.dual_clip <= 1:
        raise ConfigError(f"algo.dual_clip={algo.dual_clip} must be above 1, or 0 for none")
    if algo.correction in ("mask", *REJECTING) and not algo.correction_low <= algo.correction_cap:
        raise ConfigError(
            f"algo.correction_low={algo.correction_low} is above algo.correction_cap={algo.correction_cap}: "
            "nothing would pass; lower it"
        )
    if algo.length_penalty != "none" and algo.length_penalty_start >= algo.length_penalty_end:
        raise ConfigError(
            f"algo.length_penalty_end={algo.length_penalty_end} must be more than algo.length_penalty_start="
            f"{algo.length_penalty_start}: the penalty grows between them"
        )


def _validate_stop_reasons(algo: AlgoConfig) -> None:
    """Each names a StopReason and what is done with it; an outage is always dropped."""
    for reason, action in algo.stop_reasons.items():
        if reason not in {str(r) for r in StopReason}:
            raise ConfigError(f"algo.stop_reasons.{reason} is no stop reason: use one of {', '.join(StopReason)}")
        if action not in STOP_ACTIONS:
            raise ConfigError(f"algo.stop_reasons.{reason}={action!r} is unknown: use one of {', '.join(STOP_ACTIONS)}")
        if StopReason(reason).is_infra and action != "drop":
            raise ConfigError(f"algo.stop_reasons.{reason}={action!r}: an outage always leaves its group; use drop")
    filtered = [reason for reason, action in stop_map(algo).items() if action != "keep"]
    if not algo.run_tests_on_filtered and not filtered:
        raise ConfigError(
            f"algo.run_tests_on_filtered=false does nothing with algo.stop_preset={algo.stop_preset}: nothing is "
            "filtered; set another preset, or algo.stop_reasons"
        )


def validate_rl(algo: AlgoConfig, rollout: RolloutConfig) -> None:
    """Of a policy-gradient phase. ConfigError names the key and the cure."""
    if algo.advantage in GROUP_BASELINES and rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size={rollout.group_size} leaves nobody for algo.advantage={algo.advantage}: "
            "set rollout.group_size to 2 or more"
        )
    if rollout.group_size < 2 and algo.advantage != "gae" and algo.singleton == "zero":
        raise ConfigError(
            f"rollout.group_size={rollout.group_size} makes every advantage 0 with algo.advantage={algo.advantage} and "
            "algo.singleton=zero: set rollout.group_size to 2 or more, or algo.singleton=reward"
        )
    if rollout.temperature <= 0:
        raise ConfigError(f"rollout.temperature must be positive in a policy-gradient phase, got {rollout.temperature}")
    if algo.correction != "none" and bypasses(algo, rollout):
        raise ConfigError(
            f"algo.correction={algo.correction} does nothing with algo.old_policy={algo.old_policy} and "
            f"rollout.max_staleness={rollout.max_staleness}: the ratio is taken against the engine's logprobs already; "
            "set algo.correction=none, or algo.old_policy=recompute"
        )
    if rollout.max_staleness and algo.old_policy == "recompute" and algo.correction == "none":
        raise ConfigError(
            f"algo.old_policy=recompute takes rollouts of older weights (rollout.max_staleness="
            f"{rollout.max_staleness}) for its own: set algo.correction, or algo.old_policy=rollout"
        )
    if bypasses(algo, rollout) and algo.ratio_rule == "on_policy":
        raise ConfigError(
            "algo.ratio_rule=on_policy uses no old policy, so algo.old_policy=rollout (or rollout.max_staleness > 0) "
            "does nothing: set algo.ratio_rule=ppo"
        )
