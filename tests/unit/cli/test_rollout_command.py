"""`swe-rl rollout --show`: which episodes, what is coloured, and what the export holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from swe_rl.cli import dispatch
from swe_rl.config import ModelConfig
from swe_rl.models import nano_corpus
from swe_rl.models.tokenizers import load_tokenizer
from swe_rl.rollout import Journal, RolloutKey
from swe_rl.types import Completion, Reward, StopReason, ToolCall, Trajectory, Turn

TOKENIZER = load_tokenizer(ModelConfig(vocab_size=500), cache_dir="")
CONFIG = "model: {name: nano, vocab_size: 500}\nalgo: {stop_reasons: {max_turns: mask}}\n"


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def turn(context: str, sampled: str, **changes: Any) -> Turn:
    ids = encode(sampled)
    return Turn(
        context_ids=encode(context),
        completion=Completion(
            token_ids=ids,
            rollout_logprobs=[-0.5] * (len(ids) - 1) + [changes.pop("last_logprob", -0.5)],
            finish_reason="stop",
            policy_version=3,
            policy_version_max=3,
        ),
        **{"tool_call": ToolCall(name="bash", arguments={"command": "ls"}), "observation": "a.py", **changes},
    )


def episode(key: RolloutKey, *, value: float | None, stop: StopReason = StopReason.SUBMITTED) -> Trajectory:
    return Trajectory(
        trajectory_id=key.trajectory_id,
        task_id=key.task_id,
        group_id=key.group_id,
        rollout_index=key.rollout_index,
        turns=[
            turn("fix it: ", "ls\x1b[31m", repaired="a brace"),
            turn(" again: ", "cat é", kept_context=2, last_logprob=math.nan, format_error=True, tool_call=None),
        ],
        stop_reason=stop,
        temperature=1.0,
        patch=b"--- a\n\xff",
        reward=None if value is None else Reward(value=value, terms={"f2p": math.nan}),
        timings_s={"policy": 1.5},
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a compacted step, a step under way, and an evaluation."""
    monkeypatch.setattr(nano_corpus, "texts", lambda toolset: iter(()))
    monkeypatch.setattr(nano_corpus, "whole_words", lambda toolset: [])
    (tmp_path / "config.yaml").write_text(CONFIG)
    journal = Journal(tmp_path / "rollouts")
    for phase, step, task, value, stop in [
        ("rl", 0, "first", 1.0, StopReason.SUBMITTED),
        ("rl", 0, "second", 0.0, StopReason.MAX_TURNS),
        ("eval-rl-heldout", 0, "held", 1.0, StopReason.SUBMITTED),
        ("rl", 1, "third", None, StopReason.INFRA_ERROR),
    ]:
        key = RolloutKey(phase, step, task, 0)
        journal.append(key, episode(key, value=value, stop=stop))
    journal.compact("rl", 0)
    journal.close()
    return tmp_path


def call(*words: str) -> int:
    return dispatch.main(["rollout", *words])


@pytest.mark.parametrize(
    ("words", "tasks"),
    [
        (["--count", "9", "--phase", "rl", "--outcome", "passed"], ["first"]),
        (["--count", "9", "--phase", "rl", "--outcome", "failed"], ["second"]),
        (["--count", "9", "--outcome", "unscored"], ["third"]),
        (["--count", "9", "--phase", "eval-rl"], ["held"]),
        (["--id", "rl/0/", "--phase", "rl", "--count", "1"], ["second"]),
    ],
)
def test_choosing_episodes(run: Path, words: list[str], tasks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--show", str(run), "--list", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split("/")[2] for line in lines] == tasks
    assert "2 turns" in lines[0]


def test_trained_tokens_are_coloured_and_controls_shown(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert call("--show", str(run), "--id", "first") == 0
    out = capsys.readouterr().out
    assert "\x1b[2mfix it: \x1b[0m\x1b[30;42mls\\x1b[31m\x1b[0m" in out
    last = TOKENIZER.decode(encode("cat é")[-1:])
    assert f"\x1b[30;43m{last}\x1b[0m" in out, "its logprob is not finite: it does not train"
    assert "sample 2 begins: 2 tokens of the context stay; no action could be read" in out
    assert "repaired: a brace" in out
    assert "\x1b[31m" not in out


@pytest.mark.parametrize("name", ["second", "held", "third"])
def test_masked_and_evaluation_episodes_do_not_train(
    run: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert call("--show", str(run), "--id", name) == 0
    out = capsys.readouterr().out
    assert "fix it: ⟨ls\\x1b[31m⟩" in out
    assert out.count("⟦") == 1, "the legend"
    assert ", 0 train" in out


def test_the_export_has_ids_texts_and_masks(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out" / "episodes.json"
    assert call("--show", str(run), "--phase", "rl", "--count", "3", "--json", str(target)) == 0
    documents = json.loads(target.read_text())
    first = next(d for d in documents if d["task_id"] == "first")
    assert [d["task_id"] for d in documents].count("second") == 1
    assert (first["num_samples"], first["reward"]["terms"], first["patch"]) == (2, {"f2p": None}, "--- a\n�")
    one, two = first["turns"]
    assert (one["context"], one["sampled"], one["trained"]) == ("fix it: ", "ls\x1b[31m", [True] * len(one["trained"]))
    assert one["sampled_ids"] == encode("ls\x1b[31m")
    assert (two["kept_context"], two["trained"][-1], two["logprobs"][-1]) == (2, False, None)
    assert (two["format_error"], two["tool_call"], one["repaired"]) == (True, None, "a brace")
    assert call("--show", str(run / "rollouts" / "rl-000000.parquet"), "--json", "-") == 2, "no tokenizer beside it"
    assert "give --tokenizer DIR" in capsys.readouterr().err
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    words = ["--json", "-", "--tokenizer", str(tmp_path / "tokenizer"), "--id", "first"]
    assert call("--show", str(run / "rollouts" / "rl-000000.parquet"), *words) == 0
    assert json.loads(capsys.readouterr().out)[0]["turns"] == first["turns"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--show"),
        (["--show", "{run}", "--id", "nobody"], "has no such episode"),
        (["--show", "{run}/checkpoints"], "holds no episodes"),
        (["--show", "{run}", "--count", "0"], "--count must be positive"),
        (["--show", "{run}", "--delay", "-1"], "--delay must be 0 or more"),
        (["--show", "{run}", "--tokenizer", "{run}"], "no tokenizer can be loaded"),
        (["--show", "{run}", "--outcome", "great"], "invalid choice"),
    ],
)
def test_bad_input_is_one_line(run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*(word.format(run=run) for word in words)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
