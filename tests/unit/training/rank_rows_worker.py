"""What two torchrun ranks do in test_rank_rows: rank 0 has nearly all rows of a step, and gives some away.

Run as a script under torchrun: `rank_rows_worker.py OUT`; every rank writes OUT/RANK.pt.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tree_groups import random_group

from swe_rl.batching.layout import batch_cost, lay_out
from swe_rl.training import mesh
from swe_rl.training.rank_rows import balanced
from swe_rl.types import PackedBatch


@dataclass
class Price:
    pair_cost: float = 0.01


def rows_of(rank: int) -> list[PackedBatch]:
    """Many on rank 0, one on the others."""
    samples = random_group(random.Random(f"rank/{rank}"), size=12 if rank == 0 else 1)
    return lay_out(samples, max_tokens=30, layout="tree").batches[: None if rank == 0 else 1]


def main() -> None:
    mesh.init_distributed(device="cpu")
    rows = balanced(rows_of(mesh.rank()), backend=Price())
    costs = [batch_cost(row, pair_cost=Price.pair_cost) for row in rows]
    torch.save((costs, [row.input_ids.tolist() for row in rows]), Path(sys.argv[1]) / f"{mesh.rank()}.pt")
    mesh.shutdown()


if __name__ == "__main__":
    main()
