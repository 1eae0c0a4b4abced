"""Published evaluations have twins that run on this machine: other sizes, the same tools, prompts and rules."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from swe_rl.cli.hydra_entry import compose_config
from swe_rl.cli.verify_train import validate_judged
from swe_rl.config import TrainConfig
from swe_rl.config.evaluation import EvaluationConfig, validate_evaluation

SIZES = {
    *(f"agent.{name}" for name in ("max_turns", "soft_turns", "remind_turns", "remind_tokens", "max_context_tokens")),
    *(f"agent.{name}" for name in ("max_turn_tokens", "max_observation_tokens", "max_format_errors", "episode_s")),
    *(f"sandbox.{name}" for name in ("concurrency", "command_s", "memory_mib", "lease_s")),
    *(f"model.{name}" for name in ("hidden_size", "num_layers", "intermediate_size", "vocab_size")),
    *("engine.num_slots", "reward.grade_s", "threads", "eval.samples_per_task"),
}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for name, item in tree.items() for k, v in flat(item, f"{prefix}.{name}" if prefix else name).items()}


def differing(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    return {key for key in first | second if first.get(key) != second.get(key)}


@pytest.mark.parametrize("name", ["deepswe_verified_16x", "nebius_10x", "verified50"])
def test_a_twin_of_a_protocol_changes_sizes_only(name: str) -> None:
    found = []
    for option in (name, f"{name}_smoke"):
        config = compose_config(EvaluationConfig, "eval", ["task=dataset", "task.source=d", f"+eval={option}"])
        validate_evaluation(config)
        found.append(flat(asdict(config)))
    split = next(key for key in found[0] if key.startswith("eval.splits."))
    assert differing(*found) <= SIZES | {split}
    assert found[1][split] == found[1]["eval.samples_per_task"] == 2


def test_the_question_of_rollouts_or_tokens_is_the_protocol_with_longer_episodes() -> None:
    words = ["task=dataset", "task.source=d"]
    found = [
        flat(asdict(compose_config(EvaluationConfig, "eval", [*words, f"+eval={option}"])))
        for option in ("deepswe_verified_16x", "rollouts_against_tokens")
    ]
    changed = {"agent.max_context_tokens", "agent.soft_turns", "agent.remind_turns", "agent.remind_tokens"}
    assert differing(*found) == changed | {"model.yarn_factor", "model.yarn_original_context"}
    assert found[1]["agent.max_context_tokens"] == 4 * found[1]["model.yarn_original_context"] == 131072


def test_the_twin_of_the_published_verifier_changes_sizes_and_back_ends_only() -> None:
    found = []
    for experiment in ("r2e_verifier", "r2e_verifier_smoke"):
        config = compose_config(
            TrainConfig, "train", [f"experiment={experiment}", "task.source=minirepo", "verifier.rollouts=[d]"]
        )
        validate_judged(config)
        found.append(flat(asdict(config)))
    found[0]["phases"], found[1]["phases"] = (
        {**values["phases"][0], "num_tasks": 0, "samples_per_task": 0, "batch_size": 0} for values in found
    )
    changed = {key for key in differing(*found) if key.split(".")[0] in ("verifier", "trainer", "algo", "phases")}
    assert changed == {"verifier.max_tokens", "trainer.fsdp", "trainer.activation_checkpointing"}
    ratio = {values["model.lora_alpha"] / values["model.lora_rank"] for values in found}
    assert ratio == {2.0}
