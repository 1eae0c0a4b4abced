"""`swe-rl doctor --parity`: one line and an exit code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swe_rl.cli import main
from swe_rl.inference import EmbeddedEngine
from swe_rl.types import Completion

# A model that is quickly made; the rest is that of `swe-rl train`.
SMALL = ["experiment=smoke", "threads=1", "agent.max_context_tokens=256"]


def test_agreement_is_one_line_and_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--parity", *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.startswith("trainer and engine agree: mean |trainer - engine| logprob over ")
    assert out.count("\n") == 1


def test_disagreement_is_exit_code_1_with_the_causes_in_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EmbeddedEngine.generate

    async def halved(self: Any, prompt: Any, params: Any, *, session: str) -> Completion:
        return await real(self, prompt, replace(params, temperature=0.5), session=session)

    monkeypatch.setattr(EmbeddedEngine, "generate", halved)
    # Nano begins nearly uniform: its weights are made larger, or no temperature would show.
    monkeypatch.setattr("swe_rl.cli.doctor_parity._loaded", sharpened)
    assert main(["doctor", "--parity", *SMALL]) == 1
    out = capsys.readouterr().out
    assert "trainer and engine disagree" in out
    assert "likely causes, in order: 1. temperature: the engine's numbers fit at about 0.5" in out


def sharpened(cfg: Any) -> Any:
    from swe_rl.cli.build import load_policy

    model, tokenizer = load_policy(cfg)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0)
    return model, tokenizer


def test_words_without_parity_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "engine=vllm_cpu"]) == 2
    assert "means nothing to swe-rl doctor without --parity" in capsys.readouterr().err
    assert main(["doctor", "--parity", "engine.layout=servers"]) == 2
    assert "engine.layout does nothing for engine.backend=embedded" in capsys.readouterr().err
