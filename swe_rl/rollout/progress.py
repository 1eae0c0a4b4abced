"""What the terminal shows while rollouts run: how many are done, how many passed, tokens per second."""

from __future__ import annotations

import math
import time

from swe_rl.metrics import MetricsLogger, Progress
from swe_rl.types import Task, Trajectory


class RolloutProgress:
    """Counts finished rollouts of the current step (or evaluation); give its `add` to a Collector as `on_rollout`."""

    def __init__(self, metrics: MetricsLogger) -> None:
        self._metrics = metrics
        self._phase, self._num_steps, self._per_step = "", 0, 0
        self._group_prefix, self._step = "", 0
        self._done = self._graded = self._passed = self._tokens = 0
        self._started = time.monotonic()

    def begin(self, phase: str, *, rollouts_per_step: int, num_steps: int = 0) -> None:
        """A new phase or evaluation, of `num_steps` optimiser steps (0: none) with so many rollouts each."""
        self._phase, self._num_steps, self._per_step = phase, num_steps, rollouts_per_step
        self._group_prefix = ""

    def add(self, task: Task, trajectory: Trajectory) -> None:
        """One more finished rollout; rollouts of another step start a new count."""
        prefix = trajectory.group_id.removesuffix(task.task_id)
        if prefix != self._group_prefix:
            self._group_prefix, self._step = prefix, int(prefix.split("/")[-2]) + 1
            self._done = self._graded = self._passed = self._tokens = 0
            self._started = time.monotonic()
        self._done += 1
        if trajectory.reward is not None and math.isfinite(trajectory.reward.value):  # demonstrations are not graded
            self._graded += 1
            self._passed += trajectory.reward.solved
        self._tokens += trajectory.num_sampled_tokens
        elapsed = time.monotonic() - self._started
        self._metrics.progress(
            Progress(
                phase=self._phase,
                step=self._step if self._num_steps else 0,
                num_steps=self._num_steps,
                rollouts_done=self._done,
                rollouts_total=self._per_step,
                success=self._passed / self._graded if self._graded else None,
                tokens_per_s=self._tokens / elapsed if elapsed > 1 else None,
            )
        )
