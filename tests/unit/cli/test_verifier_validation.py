"""Settings of verifiers: nothing that would do nothing, nothing that is out of bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swe_rl.cli.dispatch import main
from swe_rl.cli.hydra_entry import compose_config
from swe_rl.cli.preflight import check_backends
from swe_rl.cli.verify_pipeline import validate_pipeline
from swe_rl.cli.verify_train import validate_judged
from swe_rl.config import TrainConfig, validate
from swe_rl.errors import ConfigError

SCALING = ["experiment=test_time_scaling", "init_weights=somewhere"]
ONE = "phases=[{name: v, data: judged_rollouts, num_tasks: 2}]"


def composed(*overrides: str) -> TrainConfig:
    return compose_config(TrainConfig, "train", list(overrides))


@pytest.mark.parametrize(
    ("check", "overrides", "words"),
    [
        (validate, ["verifier.form=long"], "verifier.form='long' is unknown"),
        (validate, ["verifier.max_tokens=0"], "verifier.max_tokens must be positive"),
        (validate, ["verifier.balance=some"], "verifier.balance='some' is unknown"),
        (validate, ["verifier.form=nano", "verifier.instruction_file=x"], "verifier.instruction_file does nothing"),
        (validate, ["verifier.test_tasks=3"], "verifier.test_tasks does nothing with verifier.tests_per_task=0"),
        (validate, ["verifier.test_temperature=0.1"], "verifier.test_temperature does nothing"),
        (
            validate,
            ["verifier.tests_per_task=2", "verifier.test_asserts=9"],
            "verifier.test_asserts does nothing with verifier.test_tasks=0",
        ),
        (validate, ["reward.verifier=DIR"], "reward.verifier='DIR' and reward.verifier_weight=0: set both"),
        (validate, ["reward.verifier_weight=0.1"], "set both, or none"),
        (validate, ["reward.verifier_weight=-1"], "reward.verifier_weight must be 0 or more"),
        (validate_judged, ["experiment=quickstart"], "a verifier has one phase, with data=judged_rollouts"),
        (
            validate_judged,
            ["phases=[{name: v, data: judged_rollouts, num_tasks: 2, overrides: {agent: {max_turns: 3}}}]"],
            "phases.v.overrides.agent does nothing: a verifier's phase only says how it learns",
        ),
        (
            validate_judged,
            [*SCALING, "verifier.rollouts=[runs/a,./runs/a]"],
            "verifier.rollouts names a run twice",
        ),
        (validate_judged, ["experiment=test_time_scaling"], "init_weights is empty and model.name=nano knows nothing"),
        (validate_pipeline, [*SCALING, "eval.samples_per_task=1"], "eval.samples_per_task=1 leaves nothing to choose"),
        (validate_pipeline, [*SCALING, "~eval.splits.heldout"], "eval.splits is empty"),
        (validate_pipeline, [*SCALING, "task.source=DIR"], "verifier.test_tasks=800 does nothing for task.source=DIR"),
        (check_backends, ["experiment=smoke", ONE], "is a verifier: use swe-rl verify train"),
    ],
)
def test_refused(check: Callable[[TrainConfig], None], overrides: list[str], words: str) -> None:
    cfg = composed(*overrides)
    with pytest.raises(ConfigError) as err:
        check(cfg)
    assert words in str(err.value)
    assert "\n" not in str(err.value)


def test_the_shipped_recipes_are_valid() -> None:
    validate_pipeline(composed(*SCALING))
    validate_judged(composed("experiment=r2e_verifier", "task.source=DIR"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["score", "RUN"], "nothing to score with"),
        (["score", "RUN", "--regression", "--limit", "0"], "--limit must be positive"),
        (["score", "RUN", "--regression"], "RUN is no run directory"),
        (["train", "experiment=quickstart"], "a verifier has one phase"),
        (["pipeline", "experiment=test_time_scaling"], "init_weights is empty"),
    ],
)
def test_the_commands_say_what_is_wrong_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize("word", ["train", "score", "pipeline"])
def test_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", word, "--help"]) == 0
    assert "usage: swe-rl verify" in capsys.readouterr().out
