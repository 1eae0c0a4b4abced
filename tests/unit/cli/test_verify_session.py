"""What `swe-rl verify` opens: an engine with the weights of the policy, rollouts in the tokens of their sampling."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swe_rl.cli import build, train, verify_stored, verify_train
from swe_rl.cli.hydra_entry import Composed
from swe_rl.config import ModelConfig, PhaseConfig, TrainConfig
from swe_rl.evaluation import verifier_data


async def test_an_engine_without_weights_gets_those_of_the_policy_before_it_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    class Publisher:
        async def publish(self) -> None:
            events.append("published")

    @asynccontextmanager
    async def open_run(cfg: TrainConfig, **options: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(publisher=Publisher())

    monkeypatch.setattr(build, "open_run", open_run)
    monkeypatch.setattr(train, "install_interrupts", lambda run: None)
    cfg = TrainConfig(phases=[PhaseConfig(name="verifier", data="judged_rollouts")])
    async with verify_train.open_session(Composed(config=cfg, yaml="", choices={})):
        assert events == ["published"]


async def test_a_verifier_is_trained_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A new thread would work on GPU 0."""
    used: list[Any] = []

    async def no_questions(session: object) -> list[Any]:
        return []

    counts = {f"verifier/num_{name}": 0.0 for name in ("solved", "condensed", "too_long", "leaked", "seen")}
    monkeypatch.setattr(verify_train, "_questions", no_questions)
    monkeypatch.setattr(verify_train, "_fit", lambda *given: used.append("fit"))
    monkeypatch.setattr(verifier_data, "training_questions", lambda *given, **options: ([], counts))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    metrics = SimpleNamespace(log=lambda *given, **options: None, message=print)
    run: Any = SimpleNamespace(dir=SimpleNamespace(phase_weights=lambda name: tmp_path), metrics=metrics)
    phase = PhaseConfig(name="verifier", data="judged_rollouts")
    await verify_train.train_verifier(verify_train.Session(cfg=TrainConfig(), phase=phase, run=run))
    assert used == [3, "fit"]


@pytest.mark.parametrize(
    ("config", "tokenizer"),
    [
        ("policy: org/model", "org/model"),
        ("policy: ''\nmodel: {name: org/model}", "org/model"),
        ("policy: http://host/v1\nserver: {model: m, tokenizer: org/model}", "org/model"),
        ("policy: http://host/v1\nserver: {model: m}", "built in"),
        ("policy: oracle", "built in"),
        ("model: {name: nano}", "built in"),
    ],
)
def test_rollouts_are_read_with_the_tokenizer_that_sampled_them(
    config: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(model: ModelConfig, *, cache_dir: Path) -> str:
        return model.name

    (tmp_path / "config.yaml").write_text(config)
    monkeypatch.setattr(verify_stored, "load_tokenizer", load, raising=False)
    monkeypatch.setattr(verify_stored, "read_tokenizer", lambda name: name)
    monkeypatch.setattr(verify_stored, "built_in_tokenizer", lambda cfg: "built in")
    monkeypatch.setattr(verify_stored, "make_renderer", lambda tokenizer, **options: tokenizer)
    found: Any = verify_stored.open_stored(tmp_path).renderer()
    assert found == tokenizer
