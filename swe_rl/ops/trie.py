"""Prefix trees over the token ids of samples, and first-fit packing: csrc/ops/trie.cpp and its twin in Python.

A row of a packed tree is a context: all tokens up to it. Two samples share a row exactly where their ids agree from the
first one on, whoever sampled them; what each of them trains there stays apart (batching.tree).

A forest is written as a list of samples: `order`, depth-first with the samples that end in a node before its children
and children as they first came, and `shared`, the number of tokens that the k-th in that order has in common with the
one before it. That is all there is to a trie: from it follow rows, subtree ends, and where it can be cut.

Letters: S samples, R their tokens together, T rows (distinct contexts).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swe_rl.errors import ConfigError

LIBRARY = Path(__file__).parent / "bin" / "libtrie.so"
IMPLS = ("auto", "reference", "cpu")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Forest:
    """Samples in depth-first order. All int64 on the CPU."""

    order: Tensor  # [S] index of the sample
    shared: Tensor  # [S] tokens in common with the one before; 0 where a tree begins


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The rows of one packed batch, and where every token of every sample went."""

    input_ids: Tensor  # [T] i64
    position_ids: Tensor  # [T] i64, depth in the tree
    kv_end: Tensor  # [T] i32, the row behind the subtree of this one
    row_of: Tensor  # [R] i64, of the samples' tokens in the order of the forest


def available() -> tuple[bool, str]:
    """Whether the compiled functions are there, and what to do if not."""
    if LIBRARY.exists():
        return True, LIBRARY.name
    return False, "the C++ trie is not built: install g++ and reinstall swe-rl"


def build_forest(ids: Tensor, offsets: Tensor, *, impl: str = "auto") -> Forest:
    """The forest of S samples; sample s has the ids [offsets[s], offsets[s + 1]).

    ids [R] and offsets [S + 1] i64 on the CPU. Time is linear in R. Raises ConfigError for an unknown impl or one that
    cannot run here, ValueError for tensors that do not fit.
    """
    _check(ids, offsets)
    if _pick(impl) == "reference":
        return _build_reference(ids, offsets)
    order, shared = torch.empty(len(offsets) - 1, dtype=torch.int64), torch.empty(len(offsets) - 1, dtype=torch.int64)
    _library().swe_rl_trie_order(*_pointers(ids, offsets), len(order), *_pointers(order, shared))
    return Forest(order, shared)


def tree_rows(ids: Tensor, offsets: Tensor, forest: Forest, *, impl: str = "auto") -> TreeRows:
    """The rows of the samples in `forest`, which may be a part of those that ids and offsets hold.

    Rows stand in depth-first order, so that a subtree is contiguous: key k is visible to queries k <= q < kv_end[k].
    Raises as build_forest.
    """
    _check(ids, offsets)
    if len(forest.order) != len(forest.shared) or (len(forest.shared) and int(forest.shared[0])):
        raise ValueError("forest: order and shared must be of one length, and the first sample shares nothing")
    if len(forest.order) and not 0 <= int(forest.order.min()) <= int(forest.order.max()) < len(offsets) - 1:
        raise ValueError(f"forest.order names samples outside of the {len(offsets) - 1} that offsets delimits")
    lengths = (offsets[1:] - offsets[:-1])[forest.order]
    if bool(((forest.shared < 0) | (forest.shared > lengths)).any()):
        raise ValueError("forest.shared must lie between 0 and the length of its sample")
    if _pick(impl) == "reference":
        return _rows_reference(ids, offsets, forest)
    size, total = int((lengths - forest.shared).sum()), int(lengths.sum())
    rows = TreeRows(
        input_ids=torch.empty(size, dtype=torch.int64),
        position_ids=torch.empty(size, dtype=torch.int64),
        kv_end=torch.empty(size, dtype=torch.int32),
        row_of=torch.empty(total, dtype=torch.int64),
    )
    order, shared = forest.order.contiguous(), forest.shared.contiguous()
    written = _pointers(rows.input_ids, rows.position_ids, rows.kv_end, rows.row_of)
    _library().swe_rl_trie_rows(*_pointers(ids, offsets, order, shared), len(order), *written)
    return rows


def first_fit(lengths: Sequence[int], budget: int, *, impl: str = "auto") -> list[list[int]]:
    """Pieces in rows of at most `budget` tokens, by index: first-fit-decreasing, equal lengths in their order. A longer
    piece has a row of its own. Raises ConfigError as build_forest, ValueError for a length below 1."""
    if any(length < 1 for length in lengths):
        raise ValueError(f"lengths: every piece needs a token, got {min(lengths)}")
    if _pick(impl) == "reference":
        return _first_fit_reference(lengths, budget)
    sizes = torch.tensor(list(lengths), dtype=torch.int64)
    bins = torch.empty(len(sizes), dtype=torch.int64)
    count = _library().swe_rl_first_fit(*_pointers(sizes), len(sizes), budget, *_pointers(bins))
    rows: list[list[int]] = [[] for _ in range(count)]
    places = bins.tolist()
    for piece in sorted(range(len(places)), key=lambda i: -lengths[i]):
        rows[places[piece]].append(piece)
    return rows


def _build_reference(ids: Tensor, offsets: Tensor) -> Forest:
    """One dictionary per node."""
    flat, bounds = ids.tolist(), offsets.tolist()
    root: dict[int, Any] = {}
    ends: dict[int, list[int]] = {}  # id of a node -> the samples that end there
    for sample in range(len(bounds) - 1):
        node = root
        for token in flat[bounds[sample] : bounds[sample + 1]]:
            node = node.setdefault(token, {})
        ends.setdefault(id(node), []).append(sample)
    order: list[int] = []
    shared: list[int] = []
    low, stack = 0, [(root, 0)]
    while stack:
        node, depth = stack.pop()
        low = min(low, max(depth - 1, 0))
        for sample in ends.get(id(node), ()):
            order.append(sample)
            shared.append(low)
            low = depth
        stack.extend((child, depth + 1) for child in reversed(node.values()))
    return Forest(torch.tensor(order, dtype=torch.int64), torch.tensor(shared, dtype=torch.int64))


def _rows_reference(ids: Tensor, offsets: Tensor, forest: Forest) -> TreeRows:
    """Token by token."""
    flat, bounds = ids.tolist(), offsets.tolist()
    input_ids: list[int] = []
    depths: list[int] = []
    path: list[int] = []
    row_of: list[int] = []
    for sample, shared in zip(forest.order.tolist(), forest.shared.tolist(), strict=True):
        mine = flat[bounds[sample] : bounds[sample + 1]]
        path = path[:shared]
        for depth in range(shared, len(mine)):
            path.append(len(input_ids))
            input_ids.append(mine[depth])
            depths.append(depth)
        row_of.extend(path)
    kv_end = [len(depths)] * len(depths)
    open_rows: list[int] = []
    for row, depth in enumerate(depths):  # a row as shallow as one before it is not below that one
        while open_rows and depths[open_rows[-1]] >= depth:
            kv_end[open_rows.pop()] = row
        open_rows.append(row)
    return TreeRows(
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        position_ids=torch.tensor(depths, dtype=torch.int64),
        kv_end=torch.tensor(kv_end, dtype=torch.int32),
        row_of=torch.tensor(row_of, dtype=torch.int64),
    )


def _first_fit_reference(lengths: Sequence[int], budget: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[int] = []
    for piece in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((r for r, free in enumerate(room) if lengths[piece] <= free), None)
        if place is None:
            rows.append([])
            room.append(budget)
            place = len(rows) - 1
        rows[place].append(piece)
        room[place] -= lengths[piece]
    return rows


def flat_offsets(lengths: Sequence[int]) -> Tensor:
    """[S + 1] i64: where each of the samples begins, and where the last one ends."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)


def _check(ids: Tensor, offsets: Tensor) -> None:
    for name, tensor in (("ids", ids), ("offsets", offsets)):
        if tensor.dtype != torch.int64 or tensor.device.type != "cpu" or tensor.ndim != 1:
            raise ValueError(f"{name} must be one row of int64 on the CPU, got {tensor.dtype} {tuple(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, its stride is {tensor.stride(0)}: call contiguous()")
    if not len(offsets) or int(offsets[0]) or int(offsets[-1]) != len(ids) or bool((offsets.diff() < 0).any()):
        raise ValueError(f"offsets must rise from 0 to the {len(ids)} ids: use trie.flat_offsets")


@functools.cache
def _pick(impl: str) -> str:
    if impl not in IMPLS:
        raise ConfigError(f"impl={impl!r} is unknown: use one of {', '.join(IMPLS)}")
    usable, reason = available()
    if impl == "cpu" and not usable:
        raise ConfigError(reason)
    chosen = impl if impl != "auto" else "cpu" if usable else "reference"
    log.info("trie: impl=%s (%s)", chosen, "asked for" if impl != "auto" else reason)
    return chosen


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))  # functions of a CDLL run without Python's lock
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.swe_rl_trie_order.argtypes = [pointer, pointer, number, pointer, pointer]
    library.swe_rl_trie_order.restype = None
    library.swe_rl_trie_rows.argtypes = [pointer] * 4 + [number] + [pointer] * 4
    library.swe_rl_first_fit.argtypes = [pointer, number, number, pointer]
    library.swe_rl_trie_rows.restype = library.swe_rl_first_fit.restype = number
    return library


def _pointers(*tensors: Tensor) -> list[int]:
    assert all(tensor.is_contiguous() for tensor in tensors), "one piece of memory each"
    return [tensor.data_ptr() for tensor in tensors]
