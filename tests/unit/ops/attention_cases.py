"""Masks and tensors for the tests of attention, and the visibility they are held against, by brute force."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

Attention = Callable[..., tuple[Tensor, Tensor]]


def packed(*lengths: int, padding: int = 0) -> Tensor:
    """kv_end of documents one after the other, and a tail that nobody sees."""
    ends: list[int] = []
    for length in lengths:
        ends += [len(ends) + length] * length
    return torch.tensor([*ends, *range(len(ends), len(ends) + padding)], dtype=torch.int32)


def random_forest(size: int, seed: int, *, padding: int = 0, longest: int = 40) -> tuple[Tensor, Tensor]:
    """(kv_end [T], visible [T, T] bool) of a random forest of segments in depth-first order.

    Visibility comes from chains of parents, not from intervals: a token sees the segments above its own, whole, and its
    own up to itself. Shapes range from chains to bushes of single tokens.
    """
    rng = random.Random(seed)
    longest = rng.choice([1, 3, longest])
    climb = rng.choice([0.1, 0.5, 0.9])
    segment: list[int] = []  # of each token
    parents: list[int] = []
    path: list[int] = []
    while len(segment) < size - padding:
        while path and rng.random() < climb:
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(len(parents) - 1)
        segment += [path[-1]] * min(rng.randint(1, longest), size - padding - len(segment))
    ends = list(range(size))
    visible = torch.zeros(size, size, dtype=torch.bool)
    for query, own in enumerate(segment):
        above = set(_chain(own, parents))
        for key in range(query + 1):
            if segment[key] in above:
                visible[query, key] = True
                ends[key] = query + 1  # the last query that sees it
    return torch.tensor(ends, dtype=torch.int32), visible


def _chain(node: int, parents: list[int]) -> list[int]:
    chain = []
    while node >= 0:
        chain.append(node)
        node = parents[node]
    return chain


def crossing(size: int, seed: int) -> Tensor:
    """A valid mask that is no forest: every key has an end of its own."""
    rng = random.Random(seed)
    return torch.tensor([rng.randint(key, size) for key in range(size)], dtype=torch.int32)


def padded(kind: str) -> Tensor:
    """150 keys of which many are padding; the tail of `documents` begins inside a tile of every kernel."""
    index = torch.arange(150, dtype=torch.int32)
    if kind == "documents":
        return packed(40, 30, padding=80)
    if kind == "between":  # before, between and after two documents
        ends = torch.where(index < 50, 50, 140)
        return torch.where((index < 7) | ((index >= 50) & (index < 83)) | (index >= 140), index, ends).int()
    if kind == "forest":
        return random_forest(150, 3, padding=37)[0]
    if kind == "holes":  # keys that nobody sees, whose own queries see what is above them
        ends = torch.where(index < 60, 130, torch.where(index < 100, 100, 130))
        return torch.where((index % 7 == 3) & (index >= 3) | (index >= 130), index, ends).int()
    if kind == "crossing":
        ends = crossing(150, 3)
        ends[:5] = index[:5]
        return torch.where(index >= 120, index, ends.clamp(max=120))
    raise KeyError(kind)


PADDED = ("documents", "between", "forest", "holes", "crossing")


def poisoned(tensors: tuple[Tensor, ...], kv_end: Tensor) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """(tensors with NaN and infinities in all that must not count, blind rows [T], unseen keys [T]): q and the gradient
    of rows that see nothing, k and v of keys that nobody sees."""
    index = torch.arange(len(kv_end))
    visible = (index[None, :] <= index[:, None]) & (index[:, None] < kv_end[None, :].long())
    blind, unseen = ~visible.any(dim=1), ~visible.any(dim=0)
    assert blind.any()
    assert unseen.any()
    poison = torch.tensor([torch.nan, torch.inf, -torch.inf])
    dirty = []
    for tensor, places in zip(tensors, (blind, unseen, unseen, blind), strict=True):
        changed = tensor.clone()
        spots = changed[places]
        changed[places] = poison[torch.arange(spots.numel()) % 3].view(spots.shape).to(tensor.dtype)
        dirty.append(changed)
    return tuple(dirty), blind, unseen


def check_padding(found: list[Tensor], want: list[Tensor], blind: Tensor, unseen: Tensor, limit: float = 1e-5) -> None:
    """As `check`; exact zeros in output and gradients of padding, and an LSE of -inf."""
    check(found, want, limit=limit)
    out, lse, dq, dk, dv = found
    for tensor, places in ((out, blind), (dq, blind), (dk, unseen), (dv, unseen)):
        assert torch.equal(tensor[places], torch.zeros_like(tensor[places]))
    assert (lse[:, blind] == -torch.inf).all()


def make(
    tokens: int, heads: int, key_heads: int, head_dim: int, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, gradient of the output)."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(tokens, h, head_dim) for h in (heads, key_heads, key_heads, heads)]
    return tuple(torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes)  # type: ignore[return-value]


def results(attention: Attention, tensors: tuple[Tensor, ...], kv_end: Tensor, **options: object) -> list[Tensor]:
    """[out, lse, dq, dk, dv] of attention_with_lse or the like."""
    *inputs, grad = tensors
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out, lse = attention(*leaves, kv_end=kv_end, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


def exact(tensors: tuple[Tensor, ...], kv_end: Tensor, *, scale: float | None = None) -> list[Tensor]:
    """results by the formula in fp64, written here for itself: torch's softmax of each row that sees anything."""
    *inputs, grad = (t.double() for t in tensors)
    q, k, v = (t.detach().requires_grad_() for t in inputs)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    index = torch.arange(len(q))
    visible = (index[None, :] <= index[:, None]) & (index[:, None] < kv_end[None, :].long())
    rows = visible.any(dim=1).nonzero()[:, 0]
    outputs, norms = [], []
    for head in range(q.shape[1]):
        shared = head * k.shape[1] // q.shape[1]
        scores = factor * (q[rows, head] @ k[:, shared].T)
        scores = torch.where(visible[rows], scores, -torch.inf)
        outputs.append(torch.zeros_like(q[:, head]).index_put((rows,), scores.softmax(dim=1) @ v[:, shared]))
        norms.append(torch.full((len(q),), -torch.inf, dtype=q.dtype).index_put((rows,), scores.logsumexp(dim=1)))
    out = torch.stack(outputs, dim=1)
    return [out.detach(), torch.stack(norms).detach(), *torch.autograd.grad(out, (q, k, v), grad)]


NAMES = ("out", "lse", "dq", "dk", "dv")


def check(found: list[Tensor], want: list[Tensor], *, limit: float = 1e-5) -> None:
    """Largest difference of each, over the larger of 1 and its largest value; no NaN, and the same infinite LSEs."""
    for name, mine, right in zip(NAMES, found, want, strict=True):
        assert mine.shape == right.shape, name
        assert torch.equal(mine.isinf(), right.isinf()), name
        mine, right = (t.double().masked_fill(t.isinf(), 0.0) for t in (mine, right))
        error = float((mine - right).abs().max() / right.abs().max().clamp(min=1.0)) if right.numel() else 0.0
        assert error <= limit, f"{name}: {error:.2e} > {limit:g}"
