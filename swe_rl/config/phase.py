"""One link of the chain of a run: its keys and the checks that concern it alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import MISSING

from swe_rl.config.tasks import TaskConfig
from swe_rl.errors import ConfigError


@dataclass(kw_only=True)
class PhaseConfig:
    """One link of the chain. `data` says where training samples come from, `overrides` change any other group."""

    name: str = MISSING
    # demonstrations | passed_rollouts | rollouts | judged_rollouts (YES or NO about a trajectory, of a verifier)
    data: str = "rollouts"
    # rollouts: iterations of sampling and training, each one optimiser step unless minibatch_size says otherwise; the
    # other two derive their optimiser steps from epochs
    steps: int = 0
    tasks_per_step: int = 12  # rollouts: groups per iteration over all ranks
    minibatch_size: int = 0  # rollouts: trajectories per optimiser step over all ranks; 0: all of the iteration at once
    # rollouts: name of an earlier phase with rollouts. Of the training tasks, those are left out that it never solved
    # and those that it solved at least at the rate max_success; what it did not try stays.
    pool_from: str = ""
    max_success: float = 2 / 3  # with pool_from
    num_tasks: int = 64  # demonstrations, passed_rollouts: tasks used once at the start
    samples_per_task: int = 4  # demonstrations, passed_rollouts: attempts per task
    batch_size: int = 32  # demonstrations, passed_rollouts: trajectories per optimiser step over all ranks
    epochs: int = 1  # demonstrations, passed_rollouts
    # passed_rollouts: which of a task's equal attempts are kept once: none | sampled (same sampled ids) | patch
    dedupe: str = "none"
    max_per_task: int = 0  # passed_rollouts: attempts kept per task; 0: all
    rounds: int = 1  # passed_rollouts: so many phases NAME-1, NAME-2, ..., each sampling with the weights before it
    p_right: float = 1.0  # demonstrations: chance that an edit is right; 1 is the oracle
    p_give_up: float = 0.7  # demonstrations: chance to submit after a failed test
    cache: bool = False  # demonstrations: keep the trained weights under the cache directory and reuse them
    evaluate: bool = True  # held-out evaluation after the phase
    overrides: dict[str, Any] = field(default_factory=dict)  # of any group, nested as in this file


PHASE_GROUPS = ("sandbox", "agent", "rollout", "algo", "reward", "batching", "trainer")
PHASE_DATA = ("demonstrations", "passed_rollouts", "rollouts", "judged_rollouts")
PHASE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")  # part of file names and of metric tags
SUPERVISED = ("demonstrations", "passed_rollouts", "judged_rollouts")
DEDUPE = ("none", "sampled", "patch")
ACTS_IN: dict[str, tuple[str, ...]] = {  # key of a phase -> the data with which it means something
    "steps": ("rollouts",),
    "tasks_per_step": ("rollouts",),
    "minibatch_size": ("rollouts",),
    "pool_from": ("rollouts",),
    "max_success": ("rollouts",),
    "dedupe": ("passed_rollouts",),
    "max_per_task": ("passed_rollouts",),
    "rounds": ("passed_rollouts",),
    "num_tasks": SUPERVISED,
    "samples_per_task": SUPERVISED,
    "batch_size": SUPERVISED,
    "epochs": SUPERVISED,
    "p_right": ("demonstrations",),
    "p_give_up": ("demonstrations",),
    "cache": ("demonstrations",),
}


def expand_rounds(phases: list[PhaseConfig]) -> list[PhaseConfig]:
    """The chain that is run: a phase of several rounds as that many phases, which only differ in their names."""
    chain: list[PhaseConfig] = []
    for phase in phases:
        names = [f"{phase.name}-{number + 1}" for number in range(phase.rounds)] if phase.rounds > 1 else [phase.name]
        chain += [replace(phase, name=name, rounds=1) for name in names]
    return chain


def validate_pools(phases: list[PhaseConfig]) -> None:
    """Each pool_from names a phase before its own that samples rollouts. ConfigError names the key and the cure."""
    chain = expand_rounds(phases)
    for index, phase in enumerate(chain):
        measured = [p.name for p in chain[:index] if p.data != "demonstrations"]
        if phase.pool_from and phase.pool_from not in measured:
            raise ConfigError(
                f"phases.{phase.name}.pool_from={phase.pool_from!r} is no earlier phase with rollouts: "
                f"use one of {', '.join(measured) or 'none, there is no such phase'}"
            )


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
    for key in ("tasks_per_step", "num_tasks", "samples_per_task", "batch_size", "epochs", "rounds"):
        if getattr(phase, key) <= 0:
            raise ConfigError(f"{here}.{key} must be positive, got {getattr(phase, key)}")
    for key in ("minibatch_size", "max_per_task"):
        if getattr(phase, key) < 0:
            raise ConfigError(f"{here}.{key} must be 0 or more, got {getattr(phase, key)}")
    _validate_selection(phase, here)
    for key in ("p_right", "p_give_up"):
        if not 0 <= getattr(phase, key) <= 1:
            raise ConfigError(f"{here}.{key} must be between 0 and 1, got {getattr(phase, key)}")
        if task.source != "minirepo" and getattr(phase, key) != getattr(default, key):
            raise ConfigError(f"{here}.{key} does nothing for task.source={task.source}, only for minirepo: remove it")
    _validate_counts(phase, task, here)


def _validate_selection(phase: PhaseConfig, here: str) -> None:
    """Which rollouts and tasks are chosen."""
    if phase.dedupe not in DEDUPE:
        raise ConfigError(f"{here}.dedupe={phase.dedupe!r} is unknown: use one of {', '.join(DEDUPE)}")
    if not 0 < phase.max_success <= 1:
        raise ConfigError(f"{here}.max_success must be above 0 and at most 1, got {phase.max_success}")
    if phase.max_success != PhaseConfig.max_success and not phase.pool_from:
        raise ConfigError(f"{here}.max_success={phase.max_success} does nothing without pool_from: name a phase there")
    if phase.max_per_task >= phase.samples_per_task:
        raise ConfigError(
            f"{here}.max_per_task={phase.max_per_task} never acts: there are samples_per_task={phase.samples_per_task} "
            "attempts; lower it, or 0 keeps all"
        )


def _validate_counts(phase: PhaseConfig, task: TaskConfig, here: str) -> None:
    """What is taken at once against what there is."""
    key = "tasks_per_step" if phase.data == "rollouts" else "num_tasks"
    if 0 < task.num_train < getattr(phase, key):
        raise ConfigError(
            f"{here}.{key}={getattr(phase, key)} is more than task.num_train={task.num_train}: raise that"
        )
