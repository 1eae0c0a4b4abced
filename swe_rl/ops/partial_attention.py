"""Attention of some rows of an interval mask to some of its keys: what one rank of a context-parallel group, or one
step of a ring, computes. Parts of the same rows are merged by their log-sum-exp.

Letters: n query rows and m keys of the part, T rows of the whole mask, Hq and Hkv heads, D head dim, G = Hq / Hkv.
Which of the T rows they are is given by `q_rows` (rising) and `k_rows`. In the coordinates of the part key j is visible
to queries first[j] <= i < last[j], so whole tiles are skipped, as in ops.attention. Products and sums are fp32 (fp64).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TILE_ROWS = 256
TILE_KEYS = 4096


def visible(q_rows: Tensor, k_rows: Tensor, kv_end: Tensor) -> tuple[Tensor, Tensor]:
    """(first, last) [m]: key j is visible to queries first[j] <= i < last[j] of the part.

    q_rows [n] i64 rising, k_rows [m] i64, kv_end [T] i32 of the whole mask.
    """
    ends = kv_end[k_rows].long()
    return torch.searchsorted(q_rows, k_rows), torch.searchsorted(q_rows, ends)


def forward(q: Tensor, k: Tensor, v: Tensor, seen: tuple[Tensor, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """(out [n, Hq, D], lse [Hq, n]), both fp32 (fp64). A row that sees none of these keys has out 0 and lse -inf.

    q [n, Hq, D], k and v [m, Hkv, D]; `seen` from `visible`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape, dtype=wide)
    lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=wide)
    heads = k.shape[1]
    for rows, keys, mask in _tiles(len(q), seen):
        scores = _scores(q, k, rows, keys, scale).masked_fill_(~mask, -torch.inf)
        top = torch.logsumexp(scores, dim=-1)  # [Hkv, G, r]
        weights = scores.sub_(_finite(top)[..., None]).exp_()
        found = weights.flatten(1, 2) @ v[keys].to(wide).transpose(0, 1)  # [Hkv, G r, D]
        found = found.view(heads, -1, len(mask), q.shape[2]).flatten(0, 1).transpose(0, 1)
        merge(out[rows], lse[:, rows], found, top.flatten(0, 1))
    return out, lse


def merge(out: Tensor, lse: Tensor, found: Tensor, top: Tensor) -> None:
    """Adds attention to further keys (found [n, Hq, D], top [Hq, n]) to out and lse, in place.

    Both are means weighted by exp of their lse.
    """
    both = torch.logaddexp(lse, top)
    origin = _finite(both)
    mine, theirs = ((part - origin).exp().T[..., None] for part in (lse, top))
    out.mul_(mine).addcmul_(found, theirs)
    lse.copy_(both)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seen: tuple[Tensor, Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What this part adds to the gradients of q, k and v, fp32 (fp64).

    out and lse are those of all keys, merged: then the gradient of a part needs nothing of the other ones.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (t.new_zeros(t.shape, dtype=wide) for t in (q, k, v))
    blind = lse == -torch.inf  # [Hq, n]: what padding holds, and its gradient, may be NaN, and 0 times NaN is NaN
    grad, q = (t.masked_fill(blind.T[..., None], 0.0) for t in (grad, q))
    delta = (grad.to(wide) * out.to(wide)).sum(-1).T  # [Hq, n]
    constant = lse.masked_fill(blind, torch.inf)  # exp(score - inf) = 0
    heads = k.shape[1]
    for rows, keys, mask in _tiles(len(q), seen):
        scores = _scores(q, k, rows, keys, scale).masked_fill_(~mask, -torch.inf)
        p = scores.sub_(constant[:, rows].unflatten(0, (heads, -1))[..., None]).exp_().flatten(1, 2)  # [Hkv, G r, m]
        d_out = _by_key_head(grad[rows].to(wide), heads)  # [Hkv, G r, D]
        dp = d_out @ v[keys].to(wide).permute(1, 2, 0)
        ds = p * (dp - delta[:, rows].unflatten(0, (heads, -1)).flatten(1, 2)[..., None]) * scale
        dv.index_add_(0, keys, (p.transpose(1, 2) @ d_out).transpose(0, 1))
        dk.index_add_(0, keys, (ds.transpose(1, 2) @ _by_key_head(q[rows].to(wide), heads)).transpose(0, 1))
        found = ds @ k[keys].to(wide).transpose(0, 1)
        dq[rows] += found.view(heads, -1, len(mask), q.shape[2]).flatten(0, 1).transpose(0, 1)
    return dq, dk, dv


def _tiles(num_rows: int, seen: tuple[Tensor, Tensor]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, keys [t] i64, mask [r, t]) of each tile with a visible pair. Keys of a tile are distinct."""
    first, last = seen
    for start in range(0, num_rows, TILE_ROWS):
        stop = min(start + TILE_ROWS, num_rows)
        live = ((last > start) & (first < stop) & (first < last)).nonzero()[:, 0]
        row = torch.arange(start, stop, device=first.device)[:, None]
        for keys in live.split(TILE_KEYS) if len(live) else ():
            yield slice(start, stop), keys, (first[keys] <= row) & (row < last[keys])


def _scores(q: Tensor, k: Tensor, rows: slice, keys: Tensor, scale: float) -> Tensor:
    """[Hkv, G, r, t]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    query = _by_key_head(q[rows].to(wide), k.shape[1])
    product = query @ k[keys].to(wide).permute(1, 2, 0)
    return product.mul_(scale).view(k.shape[1], -1, rows.stop - rows.start, len(keys))


def _by_key_head(tensor: Tensor, heads: int) -> Tensor:
    """[r, Hq, D] -> [Hkv, G r, D]."""
    return tensor.transpose(0, 1).reshape(heads, -1, tensor.shape[2])


def _finite(lse: Tensor) -> Tensor:
    """0 for -inf: -inf - -inf would be NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
