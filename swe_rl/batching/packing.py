"""TrainSample -> PackedBatch: rows of several documents without padding. The label shift happens here and only here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from swe_rl.batching.columns import column
from swe_rl.errors import InvariantError
from swe_rl.models.routing import FREE, decode_routing
from swe_rl.ops.trie import first_fit
from swe_rl.types import PackedBatch, TrainSample

X = TypeVar("X")


def pack(samples: Sequence[TrainSample], *, max_tokens: int) -> list[PackedBatch]:
    """One PackedBatch per row of `assign_rows`. Tensors are on the CPU.

    Samples without token_weights get NaN weights on their trained tokens: such a batch can be scored, and training on
    it is refused. Raises InvariantError for a sample whose arrays do not fit each other.
    """
    return [pack_row([samples[i] for i in row]) for row in assign_rows(samples, max_tokens=max_tokens)]


def assign_rows(samples: Sequence[TrainSample], *, max_tokens: int) -> list[list[int]]:
    """Which samples go into which row, by index and in the order of the row.

    First-fit-decreasing by length; equal lengths keep their order, so the result depends on the input only.

    Every row holds at most `max_tokens` tokens, except that a longer sample gets a row of its own. Raises
    InvariantError for a sample whose arrays do not fit each other.
    """
    for sample in samples:
        check_sample(sample)
    return first_fit([len(sample.input_ids) for sample in samples], max_tokens)


def pack_row(row: Sequence[TrainSample]) -> PackedBatch:
    """One row from these documents, in this order. Index t is label t: what stands at t describes token t + 1."""
    lengths = [len(sample.input_ids) for sample in row]
    bounds = (0, *accumulate(lengths))
    sizes = torch.tensor(lengths)
    temperatures = torch.tensor([s.temperature for s in row], dtype=torch.float32).repeat_interleave(sizes)
    return PackedBatch(
        input_ids=_concat(row, lambda s: s.input_ids, torch.int64),
        labels=_concat(row, lambda s: _shift(s.input_ids, 0), torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        cu_seqlens_host=bounds,
        kv_end=torch.tensor(bounds[1:], dtype=torch.int32).repeat_interleave(sizes),
        loss_mask=_concat(row, lambda s: _shift(s.loss_mask, False), torch.bool),
        rollout_logprobs=_concat(row, lambda s: _shift(s.rollout_logprobs, 0.0), torch.float32),
        old_logprobs=_optional(row, lambda s: s.old_logprobs, 0.0),
        ref_logprobs=_optional(row, lambda s: s.ref_logprobs, 0.0),
        advantages=_concat(row, lambda s: _shift(s.advantages, 0.0), torch.float32),
        token_weights=_concat(row, lambda s: _shift(_weights(s), 0.0), torch.float32),
        temperature=None if all(sample.temperature == 1.0 for sample in row) else temperatures,
        policy_version=torch.tensor([s.policy_version for s in row], dtype=torch.int32).repeat_interleave(sizes),
        trajectory_ids=tuple(sample.trajectory_id for sample in row),
        sequence_coeff=_optional(row, lambda s: s.sequence_coeff, 0.0),
        value_targets=_optional(row, lambda s: s.value_targets, math.nan),
        routed_experts=_routed_experts(row),
        value_weight=torch.tensor([s.value_weight for s in row], dtype=torch.float32).repeat_interleave(sizes)
        if any(sample.value_targets for sample in row)
        else None,
    )


def empty_batch() -> PackedBatch:
    """A row of one token that trains nothing: lets a rank without work take part in collectives."""
    return pack_row(
        [
            TrainSample(
                trajectory_id="",
                input_ids=[0],
                loss_mask=[False],
                rollout_logprobs=[0.0],
                advantages=[0.0],
                turn_ids=[-1],
                policy_version=0,
                temperature=1.0,
                token_weights=[0.0],
            )
        ]
    )


def _shift(values: Sequence[X], last: X) -> list[X]:
    """values[t + 1] at t; nothing follows the last token of a document."""
    return [*values[1:], last]


def _concat(row: Sequence[TrainSample], get: Callable[[TrainSample], Sequence[float]], dtype: torch.dtype) -> Tensor:
    return column([get(sample) for sample in row], dtype)


def _optional(row: Sequence[TrainSample], get: Callable[[TrainSample], Sequence[float]], last: float) -> Tensor | None:
    """[T] f32 where a sample carries the array; `last` where others do not, and where nothing follows."""
    if not any(get(sample) for sample in row):
        return None
    return _concat(row, lambda s: _shift(get(s) or [last] * len(s.input_ids), last), torch.float32)


def _routed_experts(row: Sequence[TrainSample]) -> Tensor | None:
    """[T, layers, experts per token] i16: what computes token t stands at t. None where no sample has any."""
    found = [decode_routing(sample.routing, num_tokens=len(sample.input_ids)) for sample in row]
    shape = next((rows.shape[1:] for rows in found if rows is not None), None)
    if shape is None:
        return None
    free = [torch.full((len(sample.input_ids), *shape), FREE, dtype=torch.int16) for sample in row]
    return torch.cat([other if rows is None else rows for rows, other in zip(found, free, strict=True)])


def _weights(sample: TrainSample) -> Sequence[float]:
    return sample.token_weights or [math.nan if m else 0.0 for m in sample.loss_mask]


def check_sample(sample: TrainSample) -> None:
    """Raises InvariantError for arrays that do not fit each other, and for a first token that would train."""
    size = len(sample.input_ids)
    optional = (sample.old_logprobs, sample.ref_logprobs, sample.sequence_coeff, sample.value_targets)
    arrays: list[Sequence[float]] = [sample.loss_mask, sample.rollout_logprobs, sample.advantages, sample.turn_ids]
    arrays += [_weights(sample), *(array for array in optional if array)]
    if size == 0 or any(len(array) != size for array in arrays):
        raise InvariantError(f"{sample.trajectory_id}: arrays of {[len(a) for a in arrays]} for {size} tokens")
    if sample.loss_mask[0]:
        raise InvariantError(f"{sample.trajectory_id}: the first token would train, but nothing predicts it")
