"""Samples of a rank as packed rows, and rows shared out between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from swe_rl.batching.balance import balance
from swe_rl.batching.layout import PackedSamples, batch_cost, lay_out
from swe_rl.config import TrainConfig
from swe_rl.training import mesh
from swe_rl.types import PackedBatch, TrainSample


class Priced(Protocol):
    """The part of TorchBackend that knows what a token costs."""

    pair_cost: float  # see models.costs


def ranks_per_row(cfg: TrainConfig) -> int:
    """How many ranks with rows of their own compute those together; Megatron's ranks see to that themselves."""
    return cfg.trainer.context_parallel if cfg.trainer.backend == "torch" else 1


def laid_out(samples: Sequence[TrainSample], cfg: TrainConfig, *, backend: Priced) -> PackedSamples:
    """The samples as packed rows, in the layout that batching.layout says or that costs less."""
    keys = cfg.batching
    return lay_out(
        samples,
        max_tokens=keys.max_tokens_per_batch,
        layout=keys.layout,
        pair_cost=backend.pair_cost if keys.layout == "auto" else 0.0,
        num_ranks=ranks_per_row(cfg),
    )


def balanced(batches: Sequence[PackedBatch], *, backend: Priced, group_size: int = 1) -> list[PackedBatch]:
    """This rank's rows after the busiest ranks gave some away, the most expensive first: ranks that work through them
    side by side then wait little for each other. Where `group_size` ranks share their rows, the groups are balanced,
    and a row goes to the rank with the same place in another group. Collective."""
    if mesh.world_size() == group_size:
        return list(batches)
    mine, place = divmod(mesh.rank(), group_size)
    own = [batch_cost(batch, pair_cost=backend.pair_cost) for batch in batches]
    table = mesh.gather_objects([(mesh.rank(), cost) for cost in own])
    homes = [home // group_size for home, _ in table]
    groups = balance([cost for _, cost in table], homes, num_ranks=mesh.world_size() // group_size)
    goals = [group for group, (home, _) in zip(groups, table, strict=True) if home == mesh.rank()]
    moves = [((group, place), batch) for group, batch in zip(goals, batches, strict=True)]
    kept = [batch for (group, _), batch in moves if group == mine]
    if groups != homes:
        leaving = [move for move in moves if move[0][0] != mine]
        kept += [batch for goal, batch in mesh.gather_objects(leaving) if goal == (mine, place)]
    return sorted(kept, key=lambda batch: -batch_cost(batch, pair_cost=backend.pair_cost))
