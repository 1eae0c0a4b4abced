"""What a gloo rank does in test_moving_samples: one step on its rollouts, of which only those of rank 0 move a weight.

Run as a script: `python moving_samples_worker.py FOLDER SIZE`; every rank works through `jobs()` and writes
FOLDER/RANK.pt.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gradients_worker as case
import torch
from forked_ranks import fork
from tree_groups import random_group

from swe_rl.config import AlgoConfig, BatchingConfig, PhaseConfig, TrainConfig, TrainerConfig
from swe_rl.training.step_batches import packed_step
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import TrainSample

PHASE = PhaseConfig(name="rl", data="rollouts", steps=1)


@dataclass(frozen=True, kw_only=True)
class Job:
    layout: str
    context: int = 1
    rule: str = "ppo"
    sharded: bool = False
    moving: bool = True  # some rollouts do

    def config(self) -> TrainConfig:
        trainer = TrainerConfig(context_parallel=self.context, fsdp=self.sharded)
        batching = BatchingConfig(layout=self.layout, max_tokens_per_batch=40)
        return TrainConfig(algo=AlgoConfig(ratio_rule=self.rule), trainer=trainer, batching=batching)


def jobs() -> list[Job]:
    made = [Job(layout=layout, context=context) for layout in ("sequence", "tree") for context in (1, 2)]
    made += [Job(layout="tree", rule="gspo"), Job(layout="sequence", context=2, rule="gspo")]
    made += [Job(layout="tree", context=2, sharded=True)]
    return [*made, *(replace(job, moving=False) for job in (made[0], made[3], made[-1]))]


def samples(job: Job, rank: int) -> list[TrainSample]:
    """Of rank 0 the turns in the second sample of a rollout have no advantage, the others have; of rank 1 none has."""
    rng = random.Random(f"moving/{rank}")
    found, seen = [], set()
    for sample in random_group(rng, size=6, vocab=4):
        old = [-rng.uniform(2.5, 5.5) if m else 0.0 for m in sample.loss_mask]
        still = rank == 1 or not job.moving or sample.trajectory_id in seen
        advantages = [0.0] * len(sample.input_ids) if still else sample.advantages
        seen.add(sample.trajectory_id)
        name = f"{rank}/{sample.trajectory_id}"
        found.append(replace(sample, trajectory_id=name, old_logprobs=old, advantages=advantages))
    return found


def trainer(job: Job) -> TorchBackend:
    cfg = job.config()
    return TorchBackend(case.build_model(torch.float64), cfg.trainer, algo=cfg.algo)


def step(job: Job, mine: Sequence[TrainSample]) -> dict[str, Any]:
    backend = trainer(job)
    rows = packed_step(mine, PHASE, job.config(), backend=backend)
    backend.backward(rows, objective="policy_gradient")
    gradients = {name: grad.clone() for name, grad in backend.gradients().items()}
    stats = backend.train_step(rows, learning_rate=1e-2)
    weights = {name: weight.clone() for name, weight in backend.weights().items()}
    return {"gradients": gradients, "stats": stats, "weights": weights}


def run_rank(folder: Path, rank: int, _size: int) -> None:
    torch.save([step(job, samples(job, rank)) for job in jobs()], folder / f"{rank}.pt")


def main() -> None:
    folder = Path(sys.argv[1])
    fork(folder, [int(sys.argv[2])], partial(run_rank, folder))


if __name__ == "__main__":
    main()
