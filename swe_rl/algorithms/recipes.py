"""Published recipes as data: what each sets in AlgoConfig. conf/algo/*.yaml may start from one and change any key."""

from __future__ import annotations

import copy
from typing import Any

from swe_rl.config import AlgoConfig
from swe_rl.errors import ConfigError

# GRPO++ of DeepSWE: leave-one-out, clip-high, constant normaliser, compact filtering; no std, KL or entropy bonus.
_COMPACT = {"max_turns": "mask", "max_tokens": "mask", "context_limit": "mask", "timeout": "mask"}

RECIPES: dict[str, dict[str, Any]] = {
    "grpo_pp": {
        "advantage": "leave_one_out",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "seq_sum_const",
        "drop_uniform_groups": False,
        "stop_reasons": _COMPACT,
    },
    # DAPO (arXiv:2503.14476): std-normalised, token mean, uniform groups dropped, over-long rollouts kept.
    "dapo": {
        "advantage": "group_std",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token_mean",
        "drop_uniform_groups": True,
        "stop_reasons": {},
    },
    # GRPO (arXiv:2402.03300): symmetric clip, mean over rows of the mean over tokens, KL to a reference.
    "grpo": {
        "advantage": "group_std",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "seq_mean",
        "kl_coeff": 0.04,
        "drop_uniform_groups": False,
        "stop_reasons": {},
    },
    # Dr.GRPO (arXiv:2503.20783): neither std nor length normalisation.
    "dr_grpo": {
        "advantage": "group_mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "seq_sum_const",
        "drop_uniform_groups": False,
        "stop_reasons": {},
    },
}


def recipe(name: str) -> AlgoConfig:
    """AlgoConfig with the ingredients of `name`. Raises ConfigError for an unknown name."""
    if name not in RECIPES:
        raise ConfigError(f"algo.recipe={name!r} is unknown: use one of {', '.join(RECIPES)}")
    return AlgoConfig(recipe=name, **copy.deepcopy(RECIPES[name]))
