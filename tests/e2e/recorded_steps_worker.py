"""Optimiser steps on recorded rollouts: `recorded_steps_worker.py RUN_DIR OUT OVERRIDE...`, alone or under torchrun.

RUN_DIR is a finished run: its weights before phase rl are the start, its rollouts of that phase the steps. Rank 0
writes OUT, a list of [loss, gradient norm, trained tokens] by step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from swe_rl.batching import to_samples
from swe_rl.cli.hydra_entry import compose_config
from swe_rl.cli.trainers import open_trainer
from swe_rl.config import TrainConfig, phase_config
from swe_rl.models.attention import PACKED, register
from swe_rl.rollout.journal import read_parquet
from swe_rl.training import mesh
from swe_rl.training.step_batches import optimizer_steps, packed_step
from swe_rl.types import TrainSample

RATE = 1e-3


def recorded(run_dir: Path, step: int) -> list[TrainSample]:
    """All rollouts of a step. Untrained policies are never rewarded: members of a group are worth more in turn."""
    found = [t for path in sorted(run_dir.rglob(f"rl-{step:06d}.parquet")) for t in read_parquet(path)]
    found.sort(key=lambda t: t.trajectory_id)
    return [sample for t in found for sample in to_samples(t, 0.8 * (t.rollout_index % 4) - 1.0)]


def main(run_dir: Path, out: Path, overrides: list[str]) -> None:
    torch.set_num_threads(1)
    device = mesh.init_distributed(device="cpu")
    base = compose_config(TrainConfig, "train", overrides)
    phase = next(phase for phase in base.phases if phase.name == "rl")
    cfg = phase_config(base, phase)
    register()
    model = AutoModelForCausalLM.from_pretrained(
        run_dir / "phases" / "warm_start", attn_implementation=PACKED, dtype=torch.float32
    )
    backend = open_trainer(cfg, model, device=device)
    rows = []
    for step in range(phase.steps):
        own = recorded(run_dir, step)[mesh.rank() :: mesh.world_size()]
        for samples in optimizer_steps(own, phase, cfg, step=step, backend=backend).parts:
            stats = backend.train_step(packed_step(samples, phase, cfg, backend=backend), learning_rate=RATE)
            rows.append([stats.loss, stats.grad_norm, stats.num_loss_tokens])
    if mesh.is_main():
        out.write_text(json.dumps(rows))
    mesh.barrier()
    mesh.shutdown()
    mesh.exit_rank(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
