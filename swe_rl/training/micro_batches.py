"""From the packed rows that ranks bring to the forward passes that each of them makes, and the way back.

Without context parallelism a rank computes its own rows. With it, the ranks of a context group pool theirs: a row is
split over all of them, unless it is `alone`: then one of them computes it and pays for no communication, while the
others compute other rows. All ranks of the job make as many passes, whatever they brought: where parameters are
sharded, each pass gathers them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swe_rl.batching import empty_batch
from swe_rl.batching.cp_split import place_rows, split, targets_of
from swe_rl.batching.layout import batch_cost
from swe_rl.config import TrainerConfig, check_context
from swe_rl.errors import ConfigError
from swe_rl.ops.context_parallel import ContextGroup, heads_divide
from swe_rl.training import mesh
from swe_rl.types import PackedBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass of this rank."""

    batch: PackedBatch  # a whole row, this rank's part of one, or a row that trains nothing
    row: int = -1  # which of the group's rows; -1: none of them
    context: ContextGroup | None = None  # of a part
    targets: Tensor | None = None  # [e] i64 of the row, on the host: those of a part; None: all

    @property
    def value_rows(self) -> Tensor | None:
        """Indices of the states whose value is asked for; None without any."""
        if self.batch.value_targets is None:
            return None
        rows = torch.isfinite(self.batch.value_targets).nonzero(as_tuple=True)[0]
        return rows if len(rows) else None


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The passes of this rank, as many as every other rank makes."""

    passes: list[MicroBatch]
    context: ContextGroup | None
    own: dict[int, int]  # rows of the group that this rank brought, in its order, and how many targets they have

    def own_results(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Results per target of each pass, on the host -> one [T] ([E] of trees) for each row that this rank brought,
        NaN where nothing was asked. Collective over the group."""
        found = [(p.row, p.targets, value) for p, value in zip(self.passes, values, strict=True) if p.row >= 0]
        group = None if self.context is None else self.context.group
        parts = found if group is None else mesh.gather_objects(found, group=group)
        results: dict[int, Tensor] = {}
        for row, targets, value in parts:
            if row not in self.own:
                continue
            if targets is None:
                results[row] = value
                continue
            whole = results.setdefault(row, value.new_full((self.own[row],), math.nan))
            whole[targets] = value
        return [results[row] for row in self.own]


def micro_batches(rows: Sequence[PackedBatch], context: ContextGroup | None, *, pair_cost: float) -> MicroBatches:
    """The passes over the rows of this rank, or of all ranks of its context group: the most expensive first, so that
    groups which work side by side wait little for each other. Collective over all ranks of the job."""
    if context is None:
        pool, own = list(rows), range(len(rows))
        passes = [MicroBatch(row, index) for index, row in enumerate(pool)]
    else:
        me = dist.get_rank(context.group)
        brought = mesh.gather_objects([(me, row) for row in rows], group=context.group)
        pool = [row for _, row in brought]
        first = next((i for i, (rank, _) in enumerate(brought) if rank == me), 0)
        own = range(first, first + len(rows))
        passes = _shared_passes(pool, context, pair_cost)
    (count,) = mesh.all_reduce_max([len(passes)])
    passes += [MicroBatch(empty_batch())] * (max(int(count), 1) - len(passes))
    return MicroBatches(passes, context, {index: len(pool[index].labels) for index in own})


def _shared_passes(pool: Sequence[PackedBatch], context: ContextGroup, pair_cost: float) -> list[MicroBatch]:
    """A pass for each row that is split, then one for every so many rows as there are ranks."""
    me, size = dist.get_rank(context.group), dist.get_world_size(context.group)
    order = sorted(range(len(pool)), key=lambda i: -batch_cost(pool[i], pair_cost=pair_cost))
    passes = []
    for index in (i for i in order if not pool[i].alone):
        placement, kv_end = place_rows(pool[index].kv_end, num_ranks=size)
        part = split(pool[index], placement, kv_end, me)
        passes.append(MicroBatch(part, index, context, targets_of(pool[index], placement, me)))
    alone = [i for i in order if pool[i].alone]
    for start in range(0, len(alone), size):
        mine = alone[start : start + size][me : me + 1]
        passes.append(MicroBatch(pool[mine[0]], mine[0]) if mine else MicroBatch(empty_batch()))
    return passes


def open_context(cfg: TrainerConfig, model_config: Any) -> ContextGroup | None:
    """The ranks that compute rows together with this one; None where rows stay whole. Collective.

    model_config of transformers. Raises ConfigError as config.check_context and check_heads.
    """
    size = cfg.context_parallel
    if size == 1:
        return None
    check_context(cfg, world_size=mesh.world_size())
    check_heads(cfg, model_config.num_attention_heads, model_config.num_key_value_heads)
    log.info("context parallelism: %d ranks compute a row together, scheme %s", size, cfg.context_scheme)
    return ContextGroup(mesh.neighbours(size), cfg.context_scheme)


def check_heads(cfg: TrainerConfig, query_heads: int, key_heads: int) -> None:
    """Raises ConfigError where the scheme "heads" cannot give each rank of a group whole heads of the model."""
    size = cfg.context_parallel
    if size > 1 and cfg.context_scheme == "heads" and not heads_divide(query_heads, key_heads, size):
        raise ConfigError(
            f"trainer.context_scheme=heads cannot split {query_heads} query and {key_heads} key-value heads over "
            f"trainer.context_parallel={size} ranks: set it to gather or ring"
        )


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with all its tensors on `device`; copies to a GPU are not waited for."""
    moved: dict[str, Any] = {}
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, Tensor):
            moved[item.name] = value.to(device, non_blocking=True)
    return replace(batch, **moved)
