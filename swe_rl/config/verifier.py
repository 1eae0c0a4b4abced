"""The keys of the group `verifier`: what judges finished trajectories without their hidden tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from swe_rl.config.bounds import Bounds
from swe_rl.errors import ConfigError


@dataclass(kw_only=True)
class VerifierConfig:
    """Of `swe-rl verify`. A phase with data=judged_rollouts says how long it trains, and on how many attempts."""

    form: str = "r2e"  # r2e | nano: how a log is written down for it, see evaluation/verifier_prompt.py
    instruction_file: str = ""  # a text that replaces the system message of the form, as a published adapter wants it
    max_tokens: int = 65_036  # of the prompt: 65,536 less 500; longest thoughts, then outputs, are left out beyond that
    answer_tokens: bool = False  # the words of the answer become tokens of their own (a small vocabulary has none)
    balance: str = (
        "pairs"  # pairs | all | none: as many solved as unsolved attempts of each task, of all, or as sampled
    )
    rollouts: list[str] = field(default_factory=list)  # run directories with graded attempts; none: they are sampled
    # Written tests, of `swe-rl verify pipeline`:
    tests_per_task: int = 0  # attempts of a test agent at each task; 0: no tests are written
    test_temperature: float = 0.8
    test_tasks: int = 0  # demonstrations that the policy imitates to become the test agent; 0: it is that as it is
    test_asserts: int = 3  # tests of one demonstration: the example of the issue, and inputs near it
    test_epochs: int = 1
    execution_s: float = 60.0  # limit of all tests on one candidate together


BOUNDS = Bounds(
    choices={"form": ("r2e", "nano"), "balance": ("pairs", "all", "none")},
    positive=("max_tokens", "test_epochs", "test_asserts", "execution_s"),
    not_negative=("tests_per_task", "test_tasks", "test_temperature"),
)


def validate_verifier(cfg: VerifierConfig) -> None:
    """Keys that would do nothing. ConfigError names the key and the cure."""
    if cfg.instruction_file and cfg.form == "nano":
        raise ConfigError("verifier.instruction_file does nothing for verifier.form=nano, which has none: remove it")
    default = VerifierConfig()
    for needed, keys in (
        ("tests_per_task", ("test_temperature", "test_tasks")),
        ("test_tasks", ("test_asserts", "test_epochs")),
    ):
        for key in keys:
            if not getattr(cfg, needed) and getattr(cfg, key) != getattr(default, key):
                raise ConfigError(f"verifier.{key} does nothing with verifier.{needed}=0: set that, or remove it")
