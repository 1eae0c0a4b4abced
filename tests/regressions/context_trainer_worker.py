"""What a gloo rank does in test_context_trainer: one step of the torch trainer on its share of the rows, and scores.

Run as a script: `python context_trainer_worker.py FOLDER SIZE...` starts SIZE ranks, for one size after the other; each
works through `jobs(SIZE)` and writes FOLDER/SIZE-RANK.pt.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gradients_worker as case
import torch
from context_gradients_worker import shortened
from forked_ranks import fork
from torch import Tensor
from tree_groups import random_group

from swe_rl.batching.layout import lay_out
from swe_rl.config import AlgoConfig
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import PackedBatch, TrainSample

VALUE_ALGO = AlgoConfig(clip_low=0.1, clip_high=0.15, advantage="gae", value_coeff=0.5)
LEARNING_RATE = 1e-2


@dataclass(frozen=True, kw_only=True)
class Job:
    context: int  # ranks that share their rows; the others are data parallel
    layout: str = "sequence"
    scheme: str = "gather"
    sharded: bool = False
    recompute: bool = False
    values: bool = False  # a value head beside the policy
    dtype: torch.dtype = torch.float64


def jobs(size: int) -> list[Job]:
    """A grid of data and context parallelism, replicated and sharded, and each scheme."""
    made = [Job(context=size, layout="tree", scheme=scheme) for scheme in ("ring", "heads")]
    made += [Job(context=context, sharded=True, recompute=True) for context in (1, 2, 4) if context <= size]
    made += [Job(context=context, layout="tree", sharded=size == 2) for context in (2, 4) if context <= size]
    return [*made, Job(context=2, values=True), Job(context=2, sharded=True, dtype=torch.float32)]


def rows(job: Job) -> list[PackedBatch]:
    """Uneven rows, of which every third is for one rank alone; the last one is shorter than a context group of four,
    the one before it trains nothing."""
    rng = random.Random(33)
    samples = [s for s in random_group(rng, size=12, vocab=4) if any(s.loss_mask)]
    samples = [replace(s, old_logprobs=[-rng.uniform(2.5, 5.5) if m else 0.0 for m in s.loss_mask]) for s in samples]
    if job.values:
        samples = [_with_values(s, rng) for s in samples]
    found = lay_out(samples, max_tokens=16 if job.layout == "tree" else 40, layout=job.layout).batches
    found = [replace(batch, alone=index % 3 == 1) for index, batch in enumerate(found)]
    silent = replace(samples[1], loss_mask=[False] * len(samples[1].input_ids), value_targets=[])
    extra = [replace(silent, trajectory_id="silent"), replace(shortened(samples[0], 3), value_targets=[])]
    return [*found, *(batch for sample in extra for batch in lay_out([sample], max_tokens=40).batches)]


def _with_values(sample: TrainSample, rng: random.Random) -> TrainSample:
    targets = [rng.uniform(-1, 1) if m and rng.random() < 0.5 else math.nan for m in sample.loss_mask]
    return replace(sample, value_targets=targets, value_weight=0.1)


def share(found: Sequence[PackedBatch], rank: int, size: int) -> list[PackedBatch]:
    """Uneven: the last rank brings nothing, the first one the most."""
    return [row for index, row in enumerate(found) if index * index % max(1, size - 1) == rank]


def trainer(job: Job, *, alone: bool = False) -> TorchBackend:
    """`alone`: in one process, for the comparison."""
    cfg = case.TrainerConfig(activation_checkpointing=job.recompute)
    if not alone:
        cfg = replace(cfg, fsdp=job.sharded, context_parallel=job.context, context_scheme=job.scheme)
    return TorchBackend(case.build_model(job.dtype), cfg, algo=VALUE_ALGO if job.values else case.ALGO)


def step(job: Job, backend: TorchBackend, mine: Sequence[PackedBatch]) -> dict[str, Any]:
    """Everything that the trainer has to say about one step."""
    scores = backend.logprobs(mine)
    values = backend.values(mine) if job.values else []
    backend.backward(mine, objective="policy_gradient")
    gradients: dict[str, Tensor] = {name: grad.clone() for name, grad in backend.gradients().items()}
    head = backend.policy.value_head
    if head is not None and head.weight.grad is not None:
        gradients["value_head"] = head.weight.grad.clone()
    stats = backend.train_step(mine, learning_rate=LEARNING_RATE)
    weights = {name: weight.clone() for name, weight in backend.weights().items()}
    found = {"scores": scores, "values": values, "gradients": gradients, "weights": weights, "stats": stats}
    return {**found, "rescored": backend.logprobs(mine)}


def run_rank(folder: Path, rank: int, size: int) -> None:
    found = [step(job, trainer(job), share(rows(job), rank, size)) for job in jobs(size)]
    torch.save(found, folder / f"{size}-{rank}.pt")


def main() -> None:
    folder, sizes = Path(sys.argv[1]), [int(size) for size in sys.argv[2:]]
    fork(folder, sizes, partial(run_rank, folder))


if __name__ == "__main__":
    main()
