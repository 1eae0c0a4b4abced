"""Samples of a rank as packed rows, and rows shared out between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from swe_rl.batching.balance import balance
from swe_rl.batching.layout import Layout, batch_cost, lay_out
from swe_rl.config import BatchingConfig
from swe_rl.training import mesh
from swe_rl.types import PackedBatch, TrainSample


class Priced(Protocol):
    """The part of TorchBackend that knows what a token costs."""

    pair_cost: float  # see models.costs


def laid_out(samples: Sequence[TrainSample], keys: BatchingConfig, *, backend: Priced) -> Layout:
    """The samples as packed rows, in the layout that batching.layout says or that costs less."""
    price = backend.pair_cost if keys.layout == "auto" else 0.0
    return lay_out(samples, max_tokens=keys.max_tokens_per_batch, layout=keys.layout, pair_cost=price)


def balanced(batches: Sequence[PackedBatch], *, backend: Priced) -> list[PackedBatch]:
    """This rank's rows after the busiest ranks gave some away, the most expensive first: ranks that work through them
    side by side then wait little for each other. Collective."""
    if mesh.world_size() == 1:
        return list(batches)
    own = [batch_cost(batch, pair_cost=backend.pair_cost) for batch in batches]
    table = mesh.gather_objects([(mesh.rank(), cost) for cost in own])
    homes = [home for home, _ in table]
    ranks = balance([cost for _, cost in table], homes, num_ranks=mesh.world_size())
    mine = [rank for rank, home in zip(ranks, homes, strict=True) if home == mesh.rank()]
    moves = list(zip(mine, batches, strict=True))
    kept = [batch for rank, batch in moves if rank == mesh.rank()]
    if ranks != homes:
        leaving = [move for move in moves if move[0] != mesh.rank()]
        kept += [batch for rank, batch in mesh.gather_objects(leaving) if rank == mesh.rank()]
    return sorted(kept, key=lambda batch: -batch_cost(batch, pair_cost=backend.pair_cost))
