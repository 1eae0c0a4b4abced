"""What gloo ranks do in test_rank_rows: rank 0 has nearly all rows of a step, and gives some away.

Run as a script: `rank_rows_worker.py FOLDER SIZE...`; of each size there are two groups, and every rank writes
FOLDER/SIZE-RANK.pt.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from forked_ranks import fork
from tree_groups import random_group

from swe_rl.batching.layout import batch_cost, lay_out
from swe_rl.training.rank_rows import balanced
from swe_rl.types import PackedBatch


@dataclass
class Price:
    pair_cost: float = 0.01


def rows_of(rank: int) -> list[PackedBatch]:
    """Many on rank 0, one on the others."""
    samples = random_group(random.Random(f"rank/{rank}"), size=12 if rank == 0 else 1)
    return lay_out(samples, max_tokens=30, layout="tree").batches[: None if rank == 0 else 1]


def run_rank(folder: Path, rank: int, size: int) -> None:
    rows = balanced(rows_of(rank), backend=Price(), group_size=size // 2)
    costs = [batch_cost(row, pair_cost=Price.pair_cost) for row in rows]
    torch.save((costs, [row.input_ids.tolist() for row in rows]), folder / f"{size}-{rank}.pt")


def main() -> None:
    folder, sizes = Path(sys.argv[1]), [int(size) for size in sys.argv[2:]]
    fork(folder, sizes, partial(run_rank, folder))


if __name__ == "__main__":
    main()
