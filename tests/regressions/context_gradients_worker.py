"""What a gloo rank does in test_context_gradients: its part of every row through the whole model, gradients summed.

Run as a script: `python context_gradients_worker.py FOLDER SIZE...` starts SIZE ranks, for one size after the other;
rank 0 writes FOLDER/SIZE.pt. Ranks are forks: torch is imported once.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gradients_worker as case
import torch
import torch.distributed as dist
from forked_ranks import fork
from torch import Tensor
from tree_groups import random_group

from swe_rl.batching.cp_split import place_rows, split
from swe_rl.batching.layout import lay_out
from swe_rl.ops.context_parallel import SCHEMES, ContextGroup
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import PackedBatch, TrainSample


@dataclass(frozen=True)
class Job:
    scheme: str
    layout: str
    dtype: torch.dtype
    checkpointing: bool = False


def jobs() -> list[Job]:
    made = [
        Job(s, layout, d) for s in SCHEMES for layout in ("sequence", "tree") for d in (torch.float64, torch.float32)
    ]
    return [*made, Job("gather", "tree", torch.float64, checkpointing=True)]


def batches(layout: str) -> list[PackedBatch]:
    """Rows with documents of three tokens and more, the last one with a single target."""
    rng = random.Random(21)
    samples = [s for s in random_group(rng, size=6, vocab=4) if any(s.loss_mask)]
    samples = [replace(s, old_logprobs=[-rng.uniform(2.5, 5.5) if m else 0.0 for m in s.loss_mask]) for s in samples]
    found = lay_out(samples, max_tokens=48, layout=layout).batches
    return [*found, *lay_out([shortened(samples[0], 4)], max_tokens=48).batches]


def shortened(sample: TrainSample, length: int) -> TrainSample:
    """Its first tokens, of which the last one trains."""
    names = ("input_ids", "rollout_logprobs", "advantages", "turn_ids", "token_weights", "old_logprobs")
    columns: dict[str, Any] = {name: getattr(sample, name)[:length] for name in names}
    return replace(sample, loss_mask=[False] * (length - 1) + [True], **columns)


def trainer(job: Job) -> TorchBackend:
    cfg = case.TrainerConfig(activation_checkpointing=job.checkpointing)
    return TorchBackend(case.build_model(job.dtype), cfg, algo=case.ALGO)


def run(job: Job, rank: int, size: int) -> dict[str, Tensor]:
    """Gradients and the loss, summed over ranks."""
    backend = trainer(job)
    backend.model.train()
    context = ContextGroup(dist.group.WORLD, job.scheme)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches(job.layout):
        part = split(batch, *place_rows(batch.kv_end, num_ranks=size, block_tokens=3), rank)
        rows = part.loss_mask.nonzero(as_tuple=True)[0]
        loss, _ = backend.policy(part, rows, algo=case.ALGO, objective="policy_gradient", context=context)
        loss.backward()
        total += loss.detach().double()
    found = {name: param.grad for name, param in backend.model.named_parameters() if param.grad is not None}
    for tensor in (total, *found.values()):
        dist.all_reduce(tensor)
    return {**found, "loss": total}


def run_rank(folder: Path, rank: int, size: int) -> None:
    found = [run(job, rank, size) for job in jobs()]
    if rank == 0:
        torch.save(found, folder / f"{size}.pt")


def main() -> None:
    folder, sizes = Path(sys.argv[1]), [int(size) for size in sys.argv[2:]]
    fork(folder, sizes, partial(run_rank, folder))


if __name__ == "__main__":
    main()
