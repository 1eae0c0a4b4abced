"""The head split over ranks: each holds consecutive rows of the weight, together they hold the vocabulary.

What crosses ranks: five numbers per row and rank (ops.row_stats), the sum of the hidden gradients, and under sequence
parallelism the trained rows themselves, which every rank has its own number of. Every rank of the group calls every
function in the same order, also with 0 rows of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from swe_rl.ops import row_stats


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which columns of the vocabulary this rank has. `group` is None where one rank has them all."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    start: int  # first column
    num_valid: int  # columns before the padding

    def local_labels(self, labels: Tensor) -> Tensor:
        """Labels [C] of the whole vocabulary as columns of this shard, -1 where another rank has them."""
        local = labels - self.start
        return torch.where((local >= 0) & (local < self.num_valid), local, -1)


def shard_of(group_name: str, *, rows: int, vocab_size: int) -> VocabShard:
    """The shard of a rank that holds `rows` rows of the weight; group_name "" is a single rank."""
    group = _resolve_process_group(GroupName(group_name)) if group_name else None
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    start = rank * rows
    return VocabShard(group, rank, size, start, min(max(vocab_size - start, 0), rows))


def merge_over_ranks(stats: Tensor, shard: VocabShard) -> Tensor:
    """[C, 5] statistics of this shard -> of the whole vocabulary: one gather, then a merge in the order of ranks."""
    if shard.group is None:
        return stats
    parts = [torch.empty_like(stats) for _ in range(shard.size)]
    dist.all_gather(parts, stats.contiguous(), group=shard.group)
    return row_stats.merge(torch.stack(parts))


def reduce_hidden_grad(grad: Tensor, shard: VocabShard) -> dist.Work | None:
    """Starts the sum of partial hidden gradients [C, H] over ranks, in place; wait on what it returns."""
    return None if shard.group is None else dist.all_reduce(grad, group=shard.group, async_op=True)


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """The rows of all ranks, in the order of ranks; `own` are this rank's."""

    tensors: list[Tensor]
    own: slice


def gather_rows(tensors: list[Tensor], shard: VocabShard) -> GatheredRows:
    """Concatenates each of `tensors` [own rows, ...] over the ranks of the group; ranks may have different numbers.

    The numbers are read on the host: one synchronisation.
    """
    count = len(tensors[0])
    if shard.group is None:
        return GatheredRows(tensors, slice(0, count))
    mine = torch.tensor([count], device=tensors[0].device)
    gathered_counts = [torch.empty_like(mine) for _ in range(shard.size)]
    dist.all_gather(gathered_counts, mine, group=shard.group)
    counts = torch.cat(gathered_counts).tolist()
    before = sum(counts[: shard.rank])
    return GatheredRows([_gather(t, counts, shard) for t in tensors], slice(before, before + count))


def _gather(tensor: Tensor, counts: list[int], shard: VocabShard) -> Tensor:
    """Padded to the longest for the collective, cut again after it."""
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=shard.group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
