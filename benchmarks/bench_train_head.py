"""Training steps of the nano policy on recorded rollouts, with our head and with the plain torch one.

    python benchmarks/bench_train_head.py RUN [--steps 5] [--threads 1] [--record]

RUN is a run directory of `swe-rl train`; its RL rollouts are trained on from the weights that the phase before left.
Losses must agree; times are alternated within this process. `--record` appends to baselines/train_head.csv.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import time
from itertools import groupby
from pathlib import Path

import torch

from swe_rl.algorithms import compute_advantages
from swe_rl.batching import pack, to_samples
from swe_rl.config import AlgoConfig, ModelConfig, TrainConfig, TrainerConfig
from swe_rl.models.loading import load_model
from swe_rl.rollout.journal import read_parquet
from swe_rl.training.step_batches import weigh
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import PackedBatch, Trajectory, TrajectoryGroup

BASELINE = Path(__file__).parent / "baselines" / "train_head.csv"
IMPLS = ("reference", "auto")
LEARNING_RATE = 3e-4
GROUPS_PER_STEP = 12  # as in the default experiment


def recorded_steps(run: Path, *, steps: int) -> list[list[PackedBatch]]:
    """The packed rows of `steps` optimiser steps, as many recorded groups in each; the last ones repeat."""
    cfg = TrainConfig(algo=AlgoConfig(advantage="group_mean"))
    rollouts = [t for path in sorted((run / "rollouts").glob("rl-*.parquet")) for t in read_parquet(path)]
    usable = sorted((t for t in rollouts if t.reward is not None), key=lambda t: t.group_id)
    groups = [list(members) for _, members in groupby(usable, key=lambda t: t.group_id)]
    size = min(max(len(groups) // steps, 1), GROUPS_PER_STEP)
    chosen = [groups[(step * size) % len(groups) :][:size] for step in range(steps)]
    return [_packed([t for group in groups_of_step for t in _credited(group)], cfg) for groups_of_step in chosen]


def _credited(members: list[Trajectory]) -> list[tuple[Trajectory, float]]:
    group = TrajectoryGroup(group_id=members[0].group_id, task_id=members[0].task_id, trajectories=members)
    return list(zip(members, compute_advantages(group, "group_mean"), strict=True))


def _packed(rows: list[tuple[Trajectory, float]], cfg: TrainConfig) -> list[PackedBatch]:
    samples = [sample for trajectory, advantage in rows for sample in to_samples(trajectory, advantage)]
    return pack(weigh(samples, cfg), max_tokens=cfg.batching.max_tokens_per_batch)


def train(run: Path, steps: list[list[PackedBatch]], impl: str) -> tuple[list[float], list[float]]:
    """(losses, seconds) of one optimiser step after the other with head_impl=`impl`."""
    model, _ = load_model(ModelConfig(name=str(run.resolve() / "phases" / "rft")), cache_dir=run)
    trainer = TorchBackend(model, TrainerConfig(learning_rate=LEARNING_RATE, head_impl=impl), algo=AlgoConfig())
    losses, seconds = [], []
    for batches in steps:
        started = time.perf_counter()
        losses.append(trainer.train_step(batches, learning_rate=LEARNING_RATE).loss)
        seconds.append(time.perf_counter() - started)
    return losses, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    steps = recorded_steps(args.run, steps=args.steps)
    seconds: dict[str, list[float]] = {impl: [] for impl in IMPLS}
    losses = {}
    for _ in range(args.repeats):
        for impl in IMPLS:
            losses[impl], spent = train(args.run, steps, impl)
            seconds[impl].append(sum(spent))
    tokens = sum(len(batch.input_ids) for batches in steps for batch in batches)
    trained = sum(int(batch.loss_mask.sum()) for batches in steps for batch in batches)
    row = {
        "steps": args.steps,
        "tokens": tokens,
        "trained_fraction": round(trained / tokens, 3),
        "threads": args.threads,
        "reference_s": round(min(seconds["reference"]), 3),
        "ours_s": round(min(seconds["auto"]), 3),
        "ratio": round(statistics.median(a / b for a, b in zip(*seconds.values(), strict=True)), 3),
        "loss_difference": max(abs(a - b) for a, b in zip(*losses.values(), strict=True)),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    print(row)
    if args.record:
        new = not BASELINE.exists()
        with BASELINE.open("a", newline="") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)


if __name__ == "__main__":
    main()
