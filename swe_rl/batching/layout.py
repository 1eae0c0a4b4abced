"""Samples -> packed rows, one by one or as trees: which of the two takes less time, and the way back.

Cost model: a token costs 1 (the matrix products of the model), a (query, key) pair of attention `pair_cost` of that
(models.costs), and in a tree TREE_SLOWDOWN times as much.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from swe_rl.batching.packing import assign_rows, pack_row
from swe_rl.batching.places import Place, unpack
from swe_rl.batching.tree import plan_trees, tree_batches
from swe_rl.types import PackedBatch, TrainSample

# Attention under an interval mask against the best kernel for plain causal documents, per pair: stock Triton reaches
# about 0.65 of it on Hopper, forward and backward.
TREE_SLOWDOWN = 1.5
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSamples:
    """samples as packed rows."""

    batches: list[PackedBatch]
    samples: Sequence[TrainSample]
    places: list[list[Place]]  # of each batch

    def unpack(self, values: Sequence[Tensor], *, fill: float) -> list[list[float]]:
        """Results per target of each batch as one list [N] per sample; `fill` where nothing was asked."""
        return unpack(values, self.samples, self.places, fill=fill)


def sequence_cost(lengths: Sequence[int], *, pair_cost: float) -> float:
    """Of samples one by one, in units of one token's matrix products."""
    return sum(lengths) + pair_cost * sum(n * (n + 1) // 2 for n in lengths)


def tree_cost(tokens: int, pairs: int, *, pair_cost: float) -> float:
    """Of trees with so many rows, and rows that those see."""
    return tokens + pair_cost * TREE_SLOWDOWN * pairs


def batch_cost(batch: PackedBatch, *, pair_cost: float) -> float:
    """Of one packed row on the CPU, by the lengths of its documents or the depths of its tree."""
    if batch.target_rows is None:
        return sequence_cost([stop - start for start, stop in pairwise(batch.cu_seqlens_host)], pair_cost=pair_cost)
    size = len(batch.input_ids)
    return tree_cost(size, int(batch.position_ids.sum()) + size, pair_cost=pair_cost)


def lay_out(
    samples: Sequence[TrainSample],
    *,
    max_tokens: int,
    layout: str = "sequence",
    pair_cost: float = 0.0,
    num_ranks: int = 1,
) -> PackedSamples:
    """The samples in rows of at most `max_tokens`, as `layout` says: "sequence", "tree", or "auto": whichever costs
    less for a model with this `pair_cost`. An empty list makes no row.

    Where `num_ranks` share a row, one that one of them can hold (max_tokens / num_ranks) is `alone`; samples one by one
    that are no longer than that are packed into such rows, apart from longer ones.

    Trees are not kept apart like that. Prompts that begin alike make one tree of a whole step, so there is nothing to
    keep apart; where they differ, the few short trees leave ranks idle for longer than communication takes, as split
    rows are even to 0.1 %. Counted for groups of 186,000 to 2.3 million tokens, rows of 131,072 and Qwen3-8B with
    nothing hidden behind attention, a step takes 0.92 to 1.00 of the time on 2 ranks, but 1.00 to 1.24 on 4 and 1.00 to
    1.35 on 8; cut into pieces for one rank each, trees repeat their paths: 0.86 to 1.63.
    """
    share = max_tokens // num_ranks if num_ranks > 1 else 0
    if layout != "sequence":
        trees = plan_trees(samples, max_tokens=max_tokens)
        if layout == "tree" or _pays(samples, trees.num_tokens, trees.num_pairs, pair_cost):
            batches, places = tree_batches(samples, trees)
            return PackedSamples(batches=_mark(batches, share), samples=samples, places=places)
    rows = _sequence_rows(samples, max_tokens=max_tokens, share=share)
    return PackedSamples(
        batches=_mark([pack_row([samples[i] for i in row]) for row in rows], share),
        samples=samples,
        places=[_sequence_places(samples, row) for row in rows],
    )


def _mark(batches: list[PackedBatch], share: int) -> list[PackedBatch]:
    """Those that one rank can hold."""
    return [replace(batch, alone=True) if len(batch.input_ids) <= share else batch for batch in batches]


def _sequence_rows(samples: Sequence[TrainSample], *, max_tokens: int, share: int) -> list[list[int]]:
    """Samples of at most `share` tokens in rows of as many, all longer ones in rows of `max_tokens`."""
    short = [i for i, sample in enumerate(samples) if len(sample.input_ids) <= share]
    rest = sorted(set(range(len(samples))) - set(short))
    rows = []
    for chosen, budget in ((rest, max_tokens), (short, share)):
        found = assign_rows([samples[i] for i in chosen], max_tokens=budget)
        rows += [[chosen[i] for i in row] for row in found]
    return rows


def _pays(samples: Sequence[TrainSample], tokens: int, pairs: int, pair_cost: float) -> bool:
    lengths = [len(sample.input_ids) for sample in samples]
    flat, tree = sequence_cost(lengths, pair_cost=pair_cost), tree_cost(tokens, pairs, pair_cost=pair_cost)
    log.info(
        "layout %s: %d tokens one by one, %d as trees; cost %.4g against %.4g",
        *("tree" if tree < flat else "sequence", sum(lengths), tokens, flat, tree),
    )
    return tree < flat


def _sequence_places(samples: Sequence[TrainSample], row: Sequence[int]) -> list[Place]:
    places, start = [], 0
    for i in row:
        length = len(samples[i].input_ids)
        places.append(Place(i, start, range(1, length)))
        start += length
    return places
