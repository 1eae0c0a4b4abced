"""What each ending of an episode means for training: named maps from stop reason to keep, mask or drop.

Reasons not named are kept; infra_error and cancelled always leave the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swe_rl.types import StopReason

if TYPE_CHECKING:
    from swe_rl.config.algo import AlgoConfig

ENV_REASONS = ("env_timeout", "oom", "env_killed")
STOP_PRESETS: dict[str, dict[str, str]] = {
    # DeepSWE's compact filtering; a command that outlasts the episode is a wall clock as well, so it is masked too.
    "compact": dict.fromkeys(("max_turns", "max_tokens", "context_limit", "timeout", "env_timeout"), "mask"),
    "keep_all": {},
    # As the code that trained DeepSWE: an outlasting command stays in. It never tests what it masks
    # (run_tests_on_filtered=false), so that such a rollout enters its group's baseline as 0.
    "deepswe_v01": dict.fromkeys(("max_turns", "max_tokens", "context_limit", "timeout"), "mask"),
    # rLLM today removes such rollouts before the baseline.
    "rllm_main": dict.fromkeys(
        ("prompt_too_long", "max_turns", "max_tokens", "context_limit", "timeout", *ENV_REASONS), "drop"
    ),
    # SkyRL masks the tokens and keeps the real reward; running out of turns is an ordinary ending.
    "skyrl": dict.fromkeys(("context_limit", "max_tokens", "format_error", "no_tool_call", "env_timeout"), "mask"),
    # arXiv:2508.03501: masking over-long rollouts removes the examples against looping. Use it with length_penalty.
    "nebius": {},
}


def stop_map(algo: AlgoConfig) -> dict[str, str]:
    """The preset with the entries of algo.stop_reasons over it."""
    return {**STOP_PRESETS[algo.stop_preset], **algo.stop_reasons}


def untested_reasons(algo: AlgoConfig) -> frozenset[StopReason]:
    """Endings whose rollouts are not tested, because nothing of them trains."""
    if algo.run_tests_on_filtered:
        return frozenset()
    return frozenset(StopReason(reason) for reason, action in stop_map(algo).items() if action != "keep")
