"""Which policy `swe-rl eval` takes, with which settings, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swe_rl.cli import eval_import
from swe_rl.cli.dispatch import main
from swe_rl.cli.eval_policy import short_name, spelt_out, weights_of, with_settings_of_run
from swe_rl.cli.eval_run import keep_scores
from swe_rl.cli.hydra_entry import compose_config
from swe_rl.cli.verify_stored import open_stored
from swe_rl.config import TaskConfig
from swe_rl.config.evaluation import EvaluationConfig, validate_evaluation
from swe_rl.errors import ConfigError, SandboxUnavailable
from swe_rl.evaluation.candidates import FILE_NAME, Candidate, read_candidates, write_candidates
from swe_rl.rollout import wiring
from swe_rl.tasks import load_tasks
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
        (["eval.every=3"], "eval.every is for training runs"),
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
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_text("{}")
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


def settings_of(path: Path) -> tuple[int, int]:
    config = compose_config(EvaluationConfig, "eval", with_settings_of_run([f"policy={path}"]))
    return config.agent.max_turns, config.agent.max_context_tokens


def test_weights_bring_the_settings_of_their_phase(tmp_path: Path) -> None:
    """As arXiv:2508.03501's second stage: trained with more turns and longer contexts than the run's first phases."""
    stage = "{name: stage2, data: rollouts, overrides: {agent: {max_turns: 80, max_context_tokens: 131072}}}"
    rounds = "{name: rft, data: passed_rollouts, rounds: 2, overrides: {agent: {max_turns: 30}}}"
    phases = f"[{{name: warm, data: demonstrations}}, {rounds}, {stage}]"
    (tmp_path / "config.yaml").write_text(f"agent: {{max_turns: 40, max_context_tokens: 65536}}\nphases: {phases}\n")

    def weights(place: str, **counters: int) -> Path:
        folder = tmp_path / place
        folder.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (folder / file).write_text("{}")
        state = {"format": 1, "files": {}, "backend": {}, "counters": counters}
        (folder / "state.json").write_text(json.dumps(state))
        return folder

    assert settings_of(weights("phases/warm")) == (40, 65536)
    assert settings_of(weights("phases/rft-2")) == (30, 65536)
    assert settings_of(weights("phases/stage2")) == (80, 131072)
    assert settings_of(weights("phases/test_agent")) == (40, 65536)
    # a checkpoint stands in a phase, or at its end before the next one
    assert settings_of(weights("checkpoints/step-00000001", phase=0, step=1, total=1)) == (40, 65536)
    assert settings_of(weights("checkpoints/step-00000004", phase=2, step=3, total=4)) == (30, 65536)
    assert settings_of(weights("checkpoints/step-00000005", phase=3, step=0, total=5)) == (30, 65536)
    assert settings_of(weights("checkpoints/step-00000006", phase=3, step=1, total=6)) == (80, 131072)
    assert settings_of(weights("checkpoints/step-00000009", phase=4, step=0, total=9)) == (80, 131072)
    assert settings_of(tmp_path) == (80, 131072), "the newest weights of the run"


def test_stored_rollouts_are_read_with_the_settings_of_their_phase(tmp_path: Path) -> None:
    late = "{name: rl-late, data: rollouts, overrides: {agent: {action_format: fence, toolset: bash}}}"
    (tmp_path / "config.yaml").write_text(f"agent: {{action_format: xml}}\nphases: [{{name: rl}}, {late}]\n")
    stored = open_stored(tmp_path)

    def form(label: str) -> str:
        return stored.agent_of(SimpleNamespace(group_id=f"{label}/0/task")).action_format  # type: ignore[arg-type]

    for label, wanted in {"rl": "xml", "rl-late": "fence", "eval-rl-late-heldout-sampled": "fence"}.items():
        assert form(label) == wanted
    for label in ("eval-rl-heldout-sampled", "eval-base-heldout-sampled", "eval-policy-all-sampled", "candidates-x"):
        assert form(label) == "xml"


def test_a_failure_of_an_import_leaves_no_task_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grading that goes on after the pool is closed would open sandboxes that nobody closes."""
    ended: list[str] = []

    async def grade(job: Any, *rest: object) -> None:
        if job.key.rollout_index == 0:
            raise SandboxUnavailable("no namespaces here")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled" if pool_open else "after the pool was closed")

    pool_open = False

    @asynccontextmanager
    async def pool(*given: object, **options: object) -> AsyncIterator[Any]:
        nonlocal pool_open
        pool_open = True
        try:
            yield SimpleNamespace(snapshot=None)
        finally:
            pool_open = False

    monkeypatch.setattr(eval_import, "graded", grade)
    monkeypatch.setattr(wiring, "sandbox_pool", pool)
    (task,) = load_tasks("minirepo", split="heldout", num_tasks=1, seed=TaskConfig().heldout_seed)
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    row = {"instance_id": task.task_id, "model_patch": "", "model_name_or_path": "m"}
    for file in files:
        file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ExceptionGroup):
        eval_import.main([*map(str, files), "eval.splits={heldout: 1}", f"run_dir={tmp_path / 'run'}"])
    assert ended == ["cancelled"] * 2


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
