"""What the loop writes at the end of a phase and at a checkpoint, and when it leaves both alone."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from swe_rl.config import PhaseConfig, TrainConfig
from swe_rl.train_loop import Position, export, save_checkpoint, train
from swe_rl.training import checkpoint, mesh
from swe_rl.training.checkpoint_writer import CheckpointWriter


async def test_an_interrupt_before_a_resumed_run_took_up_its_checkpoint_leaves_that_alone(tmp_path: Path) -> None:
    """The weights at hand are those of before the checkpoint."""
    path = checkpoint.save(tmp_path, {"model": {"w": torch.ones(3)}, "optimizer": {}}, step=4)
    saved = checkpoint.load(path)
    run: Any = SimpleNamespace(
        cfg=TrainConfig(phases=[PhaseConfig(name="rl", data="rollouts", steps=9)]),
        dir=SimpleNamespace(path=tmp_path),
        position=Position(step=4, total=4),
        pending_state=saved.backend,
        stopping=True,
    )
    assert not await train(run)
    assert checkpoint.latest(tmp_path) == path
    assert torch.equal(checkpoint.load_weights(path)["w"], torch.ones(3))


@pytest.mark.parametrize("waits", [False, True])
async def test_the_end_of_a_phase_waits_for_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """And what is written says what the model was then, however it is configured meanwhile."""
    model = SimpleNamespace(config=PretrainedConfig(rope_theta=7.0))
    backend = SimpleNamespace(model=model, checkpoint_state=lambda *, own: {"model": {}, "optimizer": {}})
    save, go_on = torch.save, threading.Event()

    def slow(*arguments: Any) -> None:
        assert waits or go_on.wait(60)
        save(*arguments)

    monkeypatch.setattr(torch, "save", slow)
    with closing(CheckpointWriter(behind=True)) as writer:
        run: Any = SimpleNamespace(
            cfg=TrainConfig(),
            dir=SimpleNamespace(path=tmp_path),
            position=Position(step=4, total=4),
            pending_state=None,
            checkpoints=writer,
            backend=backend,
            tokenizer=None,
            monitor=SimpleNamespace(first=None),
        )
        await save_checkpoint(run, wait=waits)
        path = checkpoint.latest(tmp_path)
        assert (path is not None) == waits
        model.config.rope_theta = 8.0
        go_on.set()
    path = checkpoint.latest(tmp_path)
    assert path is not None
    assert PretrainedConfig.from_pretrained(path).rope_theta == 7.0


@pytest.mark.parametrize("main", [True, False])
def test_the_weights_of_a_phase_are_gathered_on_the_host_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: bool
) -> None:
    asked: list[bool] = []

    def full_on_host(*, keep: bool) -> dict[str, Tensor]:
        asked.append(keep)
        return {"w": torch.arange(5.0)} if keep else {}

    monkeypatch.setattr(mesh, "is_main", lambda: main)
    backend = SimpleNamespace(model=SimpleNamespace(config=None), masters=SimpleNamespace(full_on_host=full_on_host))
    export(SimpleNamespace(cfg=TrainConfig(), backend=backend, tokenizer=None), tmp_path / "rl")  # type: ignore[arg-type]
    assert asked == [main]
    assert (tmp_path / "rl").is_dir() == main
    if main:
        assert torch.equal(checkpoint.load_weights(tmp_path / "rl")["w"], torch.arange(5.0))
