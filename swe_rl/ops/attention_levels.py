"""Attention of documents and shallow forests as a few calls of a kernel for packed sequences of two lengths.

The runs of an interval mask (ops.attention_mask) give causal squares, one call for all of them, and rectangles: the
descendants of a run see all its keys. Rectangles of runs of the same depth have no row in common, so that one call per
depth computes them. Outputs are merged in fp32 by the log-sum-exp of each row; the backward pass hands the LSE and the
output of all calls to each call, whose gradients are then exact by themselves and only added up.
Letters: T tokens, R rows and K keys of a call, D head dim.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swe_rl.ops.attention_mask import Run

Rows = slice | Tensor  # Tensor: [n] i64


@dataclass(frozen=True)
class Segments:
    """Sequences of one call: rows_starts[i]:rows_starts[i + 1] of the rows see those keys, all of them or causally."""

    row_starts: Tensor  # [segments + 1] int32 on the device
    key_starts: Tensor  # [segments + 1] int32 on the device
    max_rows: int
    max_keys: int
    causal: bool  # then rows and keys are the same


class SegmentKernel(Protocol):
    """Attention of packed sequences."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        """(out [R, Hq, D], lse [Hq, R] fp32) of q [R, Hq, D], k and v [K, Hkv, D]."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v with probabilities exp(score - lse), whatever keys the lse stands for."""


@dataclass(frozen=True)
class Level:
    """One call: which rows and keys of the T tokens it takes. No two of its rows are the same token, nor its keys."""

    rows: Rows
    keys: Rows
    segments: Segments


def depths(found: list[Run]) -> list[int] | None:
    """How many earlier runs see each run's rows; None where the runs do not nest and rectangles would overlap."""
    open_ends: list[int] = []
    result = []
    for run in found:
        while open_ends and open_ends[-1] <= run.start:
            open_ends.pop()
        if open_ends and open_ends[-1] < run.end:
            return None
        result.append(len(open_ends))
        open_ends.append(run.end)
    return result


def levels(found: list[Run], device: torch.device) -> list[Level] | None:
    """The squares, then the rectangles by depth; None where the runs do not nest. No runs: no levels."""
    depth = depths(found)
    if depth is None:
        return None
    squares = [(run.start, run.stop) for run in found]
    result = [_level(squares, squares, device, causal=True)] if found else []
    for wanted in range(max(depth, default=0) + 1):
        deep = [run for run, own in zip(found, depth, strict=True) if own == wanted and run.end > run.stop]
        if deep:
            rows, keys = [(run.stop, run.end) for run in deep], [(run.start, run.stop) for run in deep]
            result.append(_level(rows, keys, device, causal=False))
    return result


def _level(rows: list[tuple[int, int]], keys: list[tuple[int, int]], device: torch.device, *, causal: bool) -> Level:
    row_starts, key_starts = _starts(rows, device), _starts(keys, device)
    max_rows, max_keys = (max(stop - start for start, stop in spans) for spans in (rows, keys))
    segments = Segments(row_starts, key_starts, max_rows, max_keys, causal)
    picked = _rows(rows, device)
    return Level(picked, picked if causal else _rows(keys, device), segments)


def _starts(spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    starts = [0]
    for start, stop in spans:
        starts.append(starts[-1] + stop - start)
    return torch.tensor(starts, dtype=torch.int32, device=device)


def _rows(spans: list[tuple[int, int]], device: torch.device) -> Rows:
    """The tokens of the spans in order: a slice where they are adjacent."""
    if all(before[1] == after[0] for before, after in itertools.pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return torch.cat([torch.arange(start, stop) for start, stop in spans]).to(device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, calls: list[Level], scale: float, kernel: SegmentKernel
) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, D], lse [Hq, T] fp32); tokens of no call are padding."""
    if len(calls) == 1 and calls[0].rows == slice(0, len(q)):
        return kernel.forward(q, k, v, calls[0].segments, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=wide if len(calls) > 1 else q.dtype, device=q.device)
    lse = torch.full((q.shape[1], len(q)), -torch.inf, dtype=wide, device=q.device)
    for number, call in enumerate(calls):
        found, top = kernel.forward(q[call.rows], k[call.keys], v[call.keys], call.segments, scale)
        if number == 0:
            out[call.rows], lse[:, call.rows] = found.to(out.dtype), top
            continue
        before = lse[:, call.rows]  # finite: every row of a rectangle has a square
        both = torch.logaddexp(before, top)
        mine, its = ((part - both).exp().T[..., None] for part in (before, top))
        out[call.rows] = out[call.rows] * mine + found * its
        lse[:, call.rows] = both
    return out.to(q.dtype), lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    calls: list[Level],
    scale: float,
    kernel: SegmentKernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, added up over the calls in fp32."""
    if len(calls) == 1 and calls[0].rows == slice(0, len(q)):
        return kernel.backward(grad, q, k, v, out, lse, calls[0].segments, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    total = [torch.zeros(t.shape, dtype=wide if len(calls) > 1 else t.dtype, device=t.device) for t in (q, k, v)]
    for call in calls:
        rows, keys = call.rows, call.keys
        norm = lse[:, rows].contiguous()
        found = kernel.backward(grad[rows], q[rows], k[keys], v[keys], out[rows], norm, call.segments, scale)
        for whole, part, places in zip(total, found, (rows, keys, keys), strict=True):
            whole[places] += part.to(whole.dtype)
    return total[0].to(q.dtype), total[1].to(k.dtype), total[2].to(v.dtype)
