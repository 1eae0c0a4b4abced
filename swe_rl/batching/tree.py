"""Samples that share a beginning, as packed trees: every distinct context is one row, computed once.

Rows are merged where the ids agree from the first one on: a row is a context, and the hidden state of a context does
not depend on who sampled it. Targets are never merged: each sampled token keeps its own advantage, rollout logprob and
weight, as clipping is not linear in the advantage, and where the next token differs between samples a row has several
targets. What a sample repeats of others, and of itself in a later sample, is context and weighs nothing. A sample ends
at its last target: nothing is computed for what comes after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swe_rl.batching.columns import column, indices
from swe_rl.batching.fit import fit, shared_in_row
from swe_rl.batching.packing import check_sample
from swe_rl.batching.places import Place
from swe_rl.errors import InvariantError
from swe_rl.ops import trie
from swe_rl.types import PackedBatch, TrainSample


@dataclass(frozen=True, slots=True)
class Trees:
    """The samples as a forest, cut and packed; no tensors of the model yet."""

    ids: Tensor  # [R] i64 of all samples, each up to its last target
    offsets: Tensor  # [S + 1] i64
    forest: trie.Forest
    wanted: list[list[int]]  # of each sample, those of its tokens that are targets, rising
    rows: list[list[int]]  # places in the forest of the samples of each packed row, rising
    num_tokens: int  # of all rows
    num_pairs: int  # (query, key) pairs that attention visits in them


def plan_trees(samples: Sequence[TrainSample], *, max_tokens: int, impl: str = "auto") -> Trees:
    """Which samples share which row. Rows hold at most `max_tokens`, except for a single sample that is longer.

    Raises InvariantError for a sample whose arrays do not fit each other, and when one sampled token trains in two.
    """
    for sample in samples:
        check_sample(sample)
    _check_events(samples)
    wanted = [_wanted(sample) for sample in samples]
    lengths = [want[-1] if want else 0 for want in wanted]  # the tokens before the last target
    offsets = trie.flat_offsets(lengths)
    ids = column((s.input_ids[:length] for s, length in zip(samples, lengths, strict=True)), torch.int64)
    forest = trie.build_forest(ids, offsets, impl=impl)
    skip = lengths.count(0)  # samples without a target end in the root, before all others
    forest = trie.Forest(forest.order[skip:].clone(), forest.shared[skip:].clone())
    sizes, shared = [lengths[i] for i in forest.order.tolist()], forest.shared.tolist()
    rows = fit(sizes, shared, max_tokens=max_tokens, impl=impl)
    spans = [(sizes[k], low) for row in rows for k, low in zip(row, shared_in_row(row, shared), strict=True)]
    return Trees(
        ids=ids,
        offsets=offsets,
        forest=forest,
        wanted=wanted,
        rows=rows,
        num_tokens=sum(size - low for size, low in spans),
        num_pairs=sum(size * (size + 1) // 2 - low * (low + 1) // 2 for size, low in spans),
    )


def tree_batches(
    samples: Sequence[TrainSample], trees: Trees, *, impl: str = "auto"
) -> tuple[list[PackedBatch], list[list[Place]]]:
    """The packed rows, and where the targets of every sample stand in them."""
    built = [_tree_batch(samples, trees, row, impl=impl) for row in trees.rows]
    return [batch for batch, _ in built], [places for _, places in built]


def _tree_batch(
    samples: Sequence[TrainSample], trees: Trees, row: Sequence[int], *, impl: str
) -> tuple[PackedBatch, list[Place]]:
    order = trees.forest.order[row]
    shared = torch.tensor(shared_in_row(row, trees.forest.shared.tolist()), dtype=torch.int64)
    rows = trie.tree_rows(trees.ids, trees.offsets, trie.Forest(order, shared), impl=impl)
    names = order.tolist()
    borders = (rows.position_ids == 0).nonzero()[:, 0].tolist()  # trees begin at depth 0
    bounds = (*borders, len(rows.input_ids))
    places, targets, starts = [], [], [0]
    for name, first in zip(names, _starts(trees.offsets, order), strict=True):
        positions = trees.wanted[name]
        places.append(Place(name, starts[-1], positions))
        targets.append(column([positions], torch.int64) + (first - 1))
        starts.append(starts[-1] + len(positions))
    target_rows = rows.row_of[torch.cat(targets)]
    columns = _Columns([samples[name] for name in names], [trees.wanted[name] for name in names])
    batch = PackedBatch(
        input_ids=rows.input_ids,
        labels=columns.of(lambda s: s.input_ids, torch.int64),
        position_ids=rows.position_ids,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        cu_seqlens_host=bounds,
        kv_end=rows.kv_end,
        loss_mask=columns.of(lambda s: s.loss_mask, torch.bool),
        rollout_logprobs=columns.of(lambda s: s.rollout_logprobs),
        old_logprobs=columns.optional(lambda s: s.old_logprobs, 0.0),
        ref_logprobs=columns.optional(lambda s: s.ref_logprobs, 0.0),
        advantages=columns.of(lambda s: s.advantages),
        token_weights=columns.of(lambda s: s.token_weights or [math.nan if m else 0.0 for m in s.loss_mask]),
        temperature=columns.constant(lambda s: s.temperature)
        if any(samples[name].temperature != 1.0 for name in names)
        else None,
        policy_version=columns.constant(lambda s: s.policy_version, torch.int32),
        trajectory_ids=tuple(samples[name].trajectory_id for name in names),
        sequence_coeff=columns.optional(lambda s: s.sequence_coeff, 0.0),
        value_targets=columns.optional(lambda s: s.value_targets, math.nan),
        value_weight=columns.constant(lambda s: s.value_weight)
        if any(samples[name].value_targets for name in names)
        else None,
        target_rows=target_rows,
        target_bounds=tuple(starts),
        num_sample_tokens=sum(len(samples[name].input_ids) for name in names),
    )
    return batch, places


def _starts(offsets: Tensor, order: Tensor) -> list[int]:
    """Where each sample begins when those of `order` stand behind each other."""
    lengths = offsets.diff()[order]
    return (lengths.cumsum(0) - lengths).tolist()


@dataclass(frozen=True, slots=True)
class _Columns:
    """The targets of some samples behind each other."""

    samples: Sequence[TrainSample]
    wanted: Sequence[Sequence[int]]

    def of(self, get: Callable[[TrainSample], Sequence[float]], dtype: torch.dtype = torch.float32) -> Tensor:
        """What the samples say of each target."""
        pairs = zip(map(get, self.samples), self.wanted, strict=True)
        return column(([values[place] for place in chosen] for values, chosen in pairs), dtype)

    def constant(self, get: Callable[[TrainSample], float], dtype: torch.dtype = torch.float32) -> Tensor:
        """What they say of all of theirs."""
        values = torch.tensor([get(sample) for sample in self.samples], dtype=dtype)
        return values.repeat_interleave(torch.tensor([len(chosen) for chosen in self.wanted]))

    def optional(self, get: Callable[[TrainSample], Sequence[float]], missing: float) -> Tensor | None:
        if not any(get(sample) for sample in self.samples):
            return None
        return self.of(lambda sample: get(sample) or [missing] * len(sample.input_ids))


def _wanted(sample: TrainSample) -> list[int]:
    """The tokens something is asked about: trained ones, and first ones of a turn whose state has a value. Never the
    first one: there is no state before it."""
    if not sample.value_targets:
        return indices(sample.loss_mask)
    pairs = zip(sample.loss_mask[1:], sample.value_targets[1:], strict=True)
    return indices([False, *(m or t == t for m, t in pairs)])  # NaN: no target


def _check_events(samples: Sequence[TrainSample]) -> None:
    """Every sampling event trains in one sample: copies of it are context."""
    seen: dict[tuple[str, int], int] = {}
    for index, sample in enumerate(samples):
        for turn in {sample.turn_ids[place] for place in indices(sample.loss_mask)}:
            if seen.setdefault((sample.trajectory_id, turn), index) != index:
                raise InvariantError(
                    f"{sample.trajectory_id}: turn {turn} trains in two samples: mask it in those that repeat it"
                )
