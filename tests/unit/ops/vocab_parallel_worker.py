"""What a gloo rank does in test_vocab_parallel: its shard of a head, its rows, and the results to a file.

Run as a script: `python vocab_parallel_worker.py FOLDER SIZE...` starts SIZE ranks, for one size after the other; each
reads its jobs from FOLDER/jobs-SIZE.pt and writes FOLDER/SIZE-RANK.pt. Ranks are forks: torch is imported once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import head_formulas as formulas
import torch
import torch.distributed as dist
from forked_ranks import fork
from torch import Tensor

from swe_rl import ops


@dataclass(frozen=True)
class Job:
    """One head, split over the ranks of a call."""

    dtype: torch.dtype
    vocab_size: int
    shard_rows: int  # of the weight on each rank, padding included
    rows: tuple[int, ...]  # of each rank under sequence parallelism; else all ranks have the sum
    fractions: tuple[float, ...]  # of rows that train, by rank
    sequence_parallel: bool = False
    case: str = "all"  # of formulas.RULES

    def head(self, size: int) -> tuple[formulas.Head, dict[str, Tensor]]:
        """The whole head and its columns; padded rows of the weight hold large numbers."""
        head = formulas.make_head(sum(self.rows), size * self.shard_rows, 6, self.dtype, spread=0.7)
        labels = head.labels % self.vocab_size
        labels[:1], labels[-1:] = 0, self.vocab_size - 1
        head = formulas.Head(head.hidden, head.weight, labels)
        head.weight[self.vocab_size :] = 40.0
        scaling = {"temperature": self.temperature(), "vocab_size": self.vocab_size}
        columns = formulas.make_columns(head, fraction=1.0, **scaling)
        generator = torch.Generator().manual_seed(8)
        limits = torch.cat([torch.full((n,), f) for n, f in zip(self.rows, self.fractions, strict=True)])
        columns["loss_mask"] = torch.rand(sum(self.rows), generator=generator) < limits
        names = ("advantages", "token_weights", "loss_mask", *formulas.RULES[self.case][0])
        return head, {name: columns[name] for name in names}

    def temperature(self) -> Tensor:
        return torch.linspace(0.6, 1.3, sum(self.rows))


def run(job: Job, rank: int, size: int) -> dict[str, Any]:
    """Loss, statistics and gradients of this rank, and the scores of all rows."""
    head, columns = job.head(size)
    own = slice(0, sum(job.rows))
    if job.sequence_parallel:
        start = sum(job.rows[:rank])
        own = slice(start, start + job.rows[rank])
    shard = head.weight[rank * job.shard_rows : (rank + 1) * job.shard_rows].clone().requires_grad_()
    hidden = head.hidden[own].clone().requires_grad_()
    group = dist.group.WORLD
    options: dict[str, Any] = {"vocab_size": job.vocab_size, "tp_group": group}
    loss, stats = ops.linear_policy_loss(
        hidden,
        shard,
        head.labels[own],
        **{name: column[own] for name, column in columns.items()},
        **formulas.RULES[job.case][1],
        temperature=job.temperature()[own],
        sequence_parallel=job.sequence_parallel,
        **options,
    )
    (3 * loss).backward()
    found = {"loss": loss.detach(), **stats, "grad_hidden": hidden.grad, "grad_weight": shard.grad}
    whole, part = head.hidden.clone().requires_grad_(), shard.detach().requires_grad_()
    scores, entropy = ops.linear_logprob(whole, part, head.labels, temperature=job.temperature(), **options)
    weights = torch.linspace(-1, 1, len(scores), dtype=scores.dtype)
    ((scores + 0.5 * entropy) * weights).sum().backward()
    return {**found, "scores": scores.detach(), "score_hidden": whole.grad, "score_weight": part.grad}


def run_rank(folder: Path, rank: int, size: int) -> None:
    jobs = [Job(**fields) for fields in torch.load(folder / f"jobs-{size}.pt")]
    torch.save([run(job, rank, size) for job in jobs], folder / f"{size}-{rank}.pt")


def main() -> None:
    folder, sizes = Path(sys.argv[1]), [int(size) for size in sys.argv[2:]]
    fork(folder, sizes, partial(run_rank, folder))


if __name__ == "__main__":
    main()
