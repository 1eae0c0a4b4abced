"""Which policy `swe-rl eval` takes, with which settings, and what it refuses."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from swe_rl.cli.dispatch import main
from swe_rl.cli.eval_policy import short_name, spelt_out, weights_of, with_settings_of_run
from swe_rl.cli.eval_run import keep_scores
from swe_rl.cli.hydra_entry import compose_config
from swe_rl.config.evaluation import EvaluationConfig, validate_evaluation
from swe_rl.errors import ConfigError
from swe_rl.evaluation.candidates import FILE_NAME, Candidate, read_candidates, write_candidates
from swe_rl.training.run_dir import RunDir


def made(*words: str) -> EvaluationConfig:
    config = compose_config(EvaluationConfig, "eval", spelt_out(words))
    validate_evaluation(config)
    return config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["server.model=m"], "server.model does nothing for policy='': give policy=http://"),
        (["policy=http://h/v1"], "name the model that it serves with server.model=NAME"),
        (["policy=http://h/v1", "server.model=m", "server.api=completions"], "name the model's tokenizer"),
        (["policy=http://h/v1", "server.model=m", "server.api=rest"], "server.api='rest' is unknown"),
        (["policy=x", "model.name=smollm2-135m"], "both name the policy"),
        (["eval.splits={heldout: 0}"], "eval.splits.heldout=0: give a number of tasks"),
        (["eval.splits={heldout: -1}", "task=dataset", "task.source=d"], "eval.splits.heldout=-1"),
        (["eval.base_tasks=3"], "eval.base_tasks=3 is a row of training runs"),
        (["rollout.temperature=0", "eval.samples_per_task=4"], "rollout.temperature=0 gives eval.samples_per_task=4"),
        (["agent.max_turn_tokens=9999"], "agent.max_turn_tokens (9999) must be smaller"),
        (["eval.samples_per_task=0"], "eval.samples_per_task must be positive"),
        (["policy=oracle", "eval.greedy_tasks=3"], "eval.greedy_tasks=3 does nothing for policy=oracle"),
        (["polcy=x"], "polcy"),
        (["sequential.threshold=0.5"], "sequential.threshold does nothing without sequential.verifier=DIR"),
        (["sequential.verifier=d"], "eval.samples_per_task=1 has nothing to stop"),
        (["sequential.verifier=d", "eval.samples_per_task=4", "sequential.threshold=1.5"], "between 0 and 1"),
        (
            ["sequential.verifier=d", "eval.samples_per_task=4", "eval.greedy_tasks=2"],
            "eval.greedy_tasks=2 goes without",
        ),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_splits_are_those_named_or_all_that_there_is() -> None:
    assert made().splits == {"heldout": 64}
    assert made("eval.splits={heldout: 3, hard: 2}").splits == {"heldout": 3, "hard": 2}
    assert made("task=dataset", "task.source=d").splits == {"all": 0}
    assert made("task=dataset", "task.source=d", "+eval=verified50").splits == {"verified50": 50}


@pytest.mark.parametrize("name", ["deepswe_verified_16x", "nebius_10x", "verified50"])
def test_published_protocols_are_valid(name: str) -> None:
    config = made("task=dataset", "task.source=d", f"+eval={name}")
    assert config.eval.samples_per_task in (10, 16)
    assert config.rollout.temperature == 1.0


def test_kinds_of_policies() -> None:
    assert made("policy=oracle").kind == made("policy=empty").kind == "scripted"
    assert made("policy=http://h:1/v1", "server.model=m").kind == "server"
    assert made().kind == made("policy=some/model").kind == "model"
    assert made("policy=oracle").as_train().agent.max_context_tokens > 1 << 20, "a script has no context window"


def test_the_newest_weights_of_a_run(tmp_path: Path) -> None:
    for name, age in (("warm", 300), ("rl", 100)):
        folder = tmp_path / "phases" / name
        folder.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (folder / file).write_text("{}")
            os.utime(folder / file, (1_000_000 - age, 1_000_000 - age))
    assert weights_of(str(tmp_path)) == tmp_path / "phases" / "rl"
    assert weights_of(str(tmp_path / "phases" / "warm")) == tmp_path / "phases" / "warm"
    assert short_name(tmp_path / "phases" / "rl") == f"{tmp_path.name}/rl"
    assert short_name(tmp_path) == tmp_path.name
    assert weights_of("lab/model") is None, "a hub name"
    assert weights_of("oracle") is weights_of("http://h:1/v1") is None
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no weights"):
        weights_of(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="no such directory"):
        weights_of("./nowhere")


def test_a_run_brings_its_agent_settings_and_the_command_line_wins(tmp_path: Path) -> None:
    folder = tmp_path / "phases" / "rl"
    folder.mkdir(parents=True)
    agent = "{max_context_tokens: 640, toolset: minimal, memory_tools: [plan], explain_errors: true, gone: 1}"
    (tmp_path / "config.yaml").write_text(f"agent: {agent}\n")
    for path in (tmp_path, folder):
        words = with_settings_of_run([f"policy={path}", "agent.max_turns=5"])
        config = compose_config(EvaluationConfig, "eval", words)
        assert config.agent.max_context_tokens == 640
        assert list(config.agent.memory_tools) == ["plan"]
        assert config.agent.explain_errors is True
        assert config.agent.max_turns == 5
    for other in ("agent=default", "+eval=verified50"):
        assert with_settings_of_run([f"policy={tmp_path}", other]) == [f"policy={tmp_path}", other]
    assert with_settings_of_run(["policy=oracle"]) == ["policy=oracle"]


@pytest.mark.parametrize("word", ["policy=oracle", "model=smollm2"])
def test_an_import_takes_no_policy(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "import", str(tmp_path / "x.jsonl"), word]) == 2
    assert "policy and model.name do nothing for swe-rl eval import" in capsys.readouterr().err


def test_scores_survive_an_interrupted_resume(tmp_path: Path) -> None:
    first, second, third = (Candidate(trajectory_id=name, task_id="t", repository="r") for name in "abc")
    scored = replace(second, ef_score=0.75)
    write_candidates(tmp_path / FILE_NAME, [first, scored])
    assert keep_scores(RunDir(tmp_path), {"c": third}) == [scored, third]  # a is in the journal, b's score nowhere else
    assert keep_scores(RunDir(tmp_path), {"a": first, "b": second, "c": third}) == [first, scored, third]
    assert read_candidates(tmp_path) == [first, scored, third]


def test_help_of_every_word(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["eval"],
        ["eval", "compare"],
        ["eval", "show"],
        ["eval", "import"],
        ["verify"],
        ["verify", "select"],
    ):
        assert main([*words, "--help"]) == 0
        assert "example" in capsys.readouterr().out
    assert main(["verify", "guess"]) == 2
    assert "verify guess is unknown" in capsys.readouterr().err
