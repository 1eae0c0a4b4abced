"""Supervised training of verifiers and test agents, by the same trainer as everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swe_rl.batching.supervised import num_supervised_steps, supervised_batch
from swe_rl.config import PhaseConfig, TrainConfig
from swe_rl.training import mesh
from swe_rl.training.schedule import learning_rate
from swe_rl.training.step_batches import packed_step
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import StepStats, TrainSample


def train_supervised(
    backend: TorchBackend,
    samples: Sequence[TrainSample],
    phase: PhaseConfig,
    cfg: TrainConfig,
    *,
    on_step: Callable[[int, int, StepStats], None] = lambda step, steps, stats: None,
) -> int:
    """phase.epochs passes over the samples in mini-batches of phase.batch_size; returns the number of steps.

    The order follows from cfg.seed. `on_step` hears (step, number of steps, statistics) after each. Collective: under
    torchrun every rank has all samples and trains on its share of each mini-batch.
    """
    steps = num_supervised_steps(len(samples), batch_size=phase.batch_size, epochs=phase.epochs)
    for step in range(steps):
        batch = supervised_batch(
            samples,
            step=step,
            batch_size=phase.batch_size,
            seed=cfg.seed,
            rank=mesh.rank(),
            world_size=mesh.world_size(),
        )
        packed = packed_step(batch, phase, cfg, backend=backend)
        stats = backend.train_step(
            packed, learning_rate=learning_rate(cfg.trainer, step, total_steps=steps), objective="cross_entropy"
        )
        on_step(step + 1, steps, stats)
    return steps
