"""One link of the chain of a run: its keys and the checks that concern it alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from swe_rl.config.tasks import TaskConfig
from swe_rl.errors import ConfigError


@dataclass(kw_only=True)
class PhaseConfig:
    """One link of the chain. `data` says where training samples come from, `overrides` change any other group."""

    name: str = MISSING
    data: str = "rollouts"  # demonstrations | passed_rollouts | rollouts
    steps: int = 0  # rollouts: optimiser steps; the other two derive them from epochs
    tasks_per_step: int = 12  # rollouts: groups per step over all ranks
    num_tasks: int = 64  # demonstrations, passed_rollouts: tasks used once at the start
    samples_per_task: int = 4  # demonstrations, passed_rollouts: attempts per task
    batch_size: int = 32  # demonstrations, passed_rollouts: trajectories per optimiser step over all ranks
    epochs: int = 1  # demonstrations, passed_rollouts
    # demonstrations: so many optimiser steps see the first turn only, the first two, ...; then whole trajectories.
    # Short ones first teach a small model to copy names from its context within a minute instead of ten.
    turn_curriculum: list[int] = field(default_factory=list)
    p_right: float = 1.0  # demonstrations: chance that an edit is right; 1 is the oracle
    p_give_up: float = 0.7  # demonstrations: chance to submit after a failed test
    cache: bool = False  # demonstrations: keep the trained weights under the cache directory and reuse them
    evaluate: bool = True  # held-out evaluation after the phase
    overrides: dict[str, Any] = field(default_factory=dict)  # of any group, nested as in this file


PHASE_GROUPS = ("sandbox", "agent", "rollout", "algo", "reward", "batching", "trainer")
PHASE_DATA = ("demonstrations", "passed_rollouts", "rollouts")
PHASE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")  # part of file names and of metric tags
SUPERVISED = ("demonstrations", "passed_rollouts")
ACTS_IN: dict[str, tuple[str, ...]] = {  # key of a phase -> the data with which it means something
    "steps": ("rollouts",),
    "tasks_per_step": ("rollouts",),
    "num_tasks": SUPERVISED,
    "samples_per_task": SUPERVISED,
    "batch_size": SUPERVISED,
    "epochs": SUPERVISED,
    "turn_curriculum": SUPERVISED,
    "p_right": ("demonstrations",),
    "p_give_up": ("demonstrations",),
    "cache": ("demonstrations",),
}


def validate_phase(phase: PhaseConfig, task: TaskConfig) -> None:
    """The keys of the phase itself; `task` is that of the whole run."""
    here, default = f"phases.{phase.name}", PhaseConfig(name=phase.name)
    if not PHASE_NAME.fullmatch(phase.name) or phase.name == "base":  # "base" is the row of the untrained policy
        raise ConfigError(
            f"phases: {phase.name!r} is no name for a phase: use letters, digits, _ and -, and not 'base'"
        )
    if phase.data not in PHASE_DATA:
        raise ConfigError(f"{here}.data={phase.data!r} is unknown: use one of {', '.join(PHASE_DATA)}")
    for key, data in ACTS_IN.items():
        if phase.data not in data and getattr(phase, key) != getattr(default, key):
            raise ConfigError(
                f"{here}.{key} does nothing for data={phase.data}, only for {' and '.join(data)}: remove it"
            )
    if phase.data == "rollouts" and phase.steps <= 0:
        raise ConfigError(f"{here}.steps must be positive for data=rollouts, got {phase.steps}")
    for key in ("tasks_per_step", "num_tasks", "samples_per_task", "batch_size", "epochs"):
        if getattr(phase, key) <= 0:
            raise ConfigError(f"{here}.{key} must be positive, got {getattr(phase, key)}")
    if any(length <= 0 for length in phase.turn_curriculum):
        raise ConfigError(f"{here}.turn_curriculum={list(phase.turn_curriculum)} must hold positive numbers of steps")
    for key in ("p_right", "p_give_up"):
        if not 0 <= getattr(phase, key) <= 1:
            raise ConfigError(f"{here}.{key} must be between 0 and 1, got {getattr(phase, key)}")
        if task.source != "minirepo" and getattr(phase, key) != getattr(default, key):
            raise ConfigError(f"{here}.{key} does nothing for task.source={task.source}, only for minirepo: remove it")
    key = "tasks_per_step" if phase.data == "rollouts" else "num_tasks"
    if 0 < task.num_train < getattr(phase, key):
        raise ConfigError(
            f"{here}.{key}={getattr(phase, key)} is more than task.num_train={task.num_train}: raise that"
        )
