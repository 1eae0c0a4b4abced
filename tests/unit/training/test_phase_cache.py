"""Cached weights are found again only by the same phase, on the same tasks, from the same start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swe_rl.config import PhaseConfig, TrainConfig
from swe_rl.tasks import load_tasks
from swe_rl.training.phase_cache import cached_weights

TASKS = load_tasks("minirepo", split="train", num_tasks=3, seed=0)


def config(*phases: str) -> TrainConfig:
    return TrainConfig(phases=[PhaseConfig(name=name, data="demonstrations") for name in phases])


def place(cfg: TrainConfig, *, index: int = 0, tasks: int = 3) -> Path:
    return cached_weights(Path("/c"), cfg.phases[index], cfg, tasks=TASKS[:tasks], world_size=1)


def test_the_same_run_finds_them_and_what_comes_later_does_not_matter() -> None:
    base = place(config("a"))
    assert place(config("a")) == base
    assert place(config("a", "b")) == base
    assert place(replace(config("a"), run_dir="x", resume=True, threads=3)) == base


@pytest.mark.parametrize(
    "change",
    [
        lambda cfg: replace(cfg, seed=1),
        lambda cfg: replace(cfg, trainer=replace(cfg.trainer, weight_decay=0.1)),
        lambda cfg: replace(cfg, sandbox=replace(cfg.sandbox, memory_mib=64)),
        lambda cfg: replace(cfg, phases=[replace(cfg.phases[0], p_right=0.5)]),
    ],
)
def test_another_run_does_not(change: Callable[[TrainConfig], TrainConfig]) -> None:
    assert place(change(config("a"))) != place(config("a"))


def test_tasks_and_earlier_phases_and_the_start_are_part_of_the_key(tmp_path: Path) -> None:
    assert place(config("a"), tasks=2) != place(config("a"))
    assert place(config("z", "a"), index=1) != place(config("y", "a"), index=1) != place(config("a"))
    found = []
    for content in (b"one", b"two"):
        (tmp_path / "model.safetensors").write_bytes(content)
        found.append(place(replace(config("a"), init_weights=str(tmp_path))))
    assert found[0] != found[1]
