"""Attention of a packed row that is split over the ranks of a group: three ways to let queries meet all keys.

- gather: every rank gets all keys and values at once (inside a node). One softmax per row.
- ring: keys and values travel from rank to rank while the part at hand is computed (between nodes); outputs of parts
  are merged by their log-sum-exp in fp32, gradients of keys and values travel along and arrive at home.
- heads: an all-to-all turns a share of the rows into a share of the heads (both sides of ops.attention).

Any rank may have any rows: `placement` [R, n] says which, the same on all ranks. The backward pass gathers keys and
values again and keeps none of other ranks, so recomputed activations cost no memory either. Sums over ranks are taken
in a fixed order and in fp32 (fp64), so results are deterministic. Every rank calls, whether it trains or not.

Letters: R ranks, n rows of a rank, T = R n, Hq and Hkv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from swe_rl.errors import ConfigError
from swe_rl.ops import partial_attention
from swe_rl.ops.attention_dispatch import attention

SCHEMES = ("gather", "ring", "heads")


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that work on one packed row together, and how; another one for the next row if need be."""

    group: dist.ProcessGroup
    scheme: str = "gather"


def heads_divide(query_heads: int, key_heads: int, size: int) -> bool:
    """Whether the scheme "heads" can give each of `size` ranks whole heads; key heads may be repeated."""
    return query_heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kv_end: Tensor,
    placement: Tensor,
    group: dist.ProcessGroup,
    scheme: str = "gather",
    scale: float | None = None,
) -> Tensor:
    """ops.attention of T rows, of which this rank has the n rows placement[rank], in this order.

    q [n, Hq, D], k and v [n, Hkv, D] are this rank's; kv_end [T] i32 and placement [R, n] i64 (each row rising, all
    rows together a permutation of T) are those of the whole on every rank. Returns out [n, Hq, D] in q's dtype.
    Collective over `group`, forward and backward. Raises ConfigError for an unknown scheme, ValueError for tensors or
    heads that do not fit.
    """
    _check(q, k, kv_end, placement, group, scheme)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if scheme == "heads":
        return _by_heads(q, k, v, kv_end, placement, group, scale)
    parts = _Gathered if scheme == "gather" else _Ring
    out: Tensor = parts.apply(q, k, v, kv_end, placement, group, scale)
    return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_end: Tensor,
        placement: Tensor,
        group: dist.ProcessGroup,
        scale: float,
    ) -> Tensor:
        seen = partial_attention.visible(placement[dist.get_rank(group)], placement.flatten(), kv_end)
        keys, values = _all_gather((k, v), group)
        out, lse = partial_attention.forward(q, keys, values, seen, scale)
        ctx.save_for_backward(q, k, v, out, lse, *seen)
        ctx.group, ctx.scale = group, scale
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, first, last = ctx.saved_tensors
        keys, values = _all_gather((k, v), ctx.group)
        dq, *theirs = partial_attention.backward(grads[0], q, keys, values, out, lse, (first, last), ctx.scale)
        dk, dv = _sum_scatter(theirs, ctx.group)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_end: Tensor,
        placement: Tensor,
        group: dist.ProcessGroup,
        scale: float,
    ) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        out, lse, here = None, None, torch.stack([k, v])
        for step in range(size):
            coming = _Transfer(here, group) if step + 1 < size else None
            seen = partial_attention.visible(placement[rank], placement[(rank - step) % size], kv_end)
            found, top = partial_attention.forward(q, here[0], here[1], seen, scale)
            if out is None or lse is None:
                out, lse = found, top
            else:
                partial_attention.merge(out, lse, found, top)
            here = coming.wait() if coming is not None else here
        assert out is not None
        assert lse is not None
        ctx.save_for_backward(q, k, v, out, lse, kv_end, placement)
        ctx.group, ctx.scale = group, scale
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, kv_end, placement = ctx.saved_tensors
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        dq = torch.zeros_like(out)
        here, sums = torch.stack([k, v]), out.new_zeros((2, *k.shape))  # of the keys at hand, whoever's they are
        for step in range(size):
            coming = _Transfer(here, ctx.group) if step + 1 < size else None
            seen = partial_attention.visible(placement[rank], placement[(rank - step) % size], kv_end)
            part = partial_attention.backward(grads[0], q, here[0], here[1], out, lse, seen, ctx.scale)
            dq += part[0]
            sums += torch.stack(part[1:])
            sums = _Transfer(sums, ctx.group).wait()  # after the last step they are at home
            here = coming.wait() if coming is not None else here
        return dq.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype), None, None, None, None


class _Transfer:
    """Sends a tensor to the next rank of the ring and receives that of the one before; `wait` returns it."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self._sent = tensor.contiguous()  # kept alive until it has left
        self._received, self._works = self._sent, []
        if size == 1:
            return
        self._received = torch.empty_like(self._sent)
        after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        pairs = ((dist.isend, self._sent, after), (dist.irecv, self._received, before))
        self._works = dist.batch_isend_irecv([dist.P2POp(op, tensor, peer, group) for op, tensor, peer in pairs])

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


class _Exchange(torch.autograd.Function):
    """all-to-all of equal parts along the first dimension; its own inverse, so its own gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], ctx.group), None


def _by_heads(
    q: Tensor, k: Tensor, v: Tensor, kv_end: Tensor, placement: Tensor, group: dist.ProcessGroup, scale: float
) -> Tensor:
    """Key heads that are fewer than ranks are repeated; autograd sums their gradients."""
    size = placement.shape[0]
    repeats = max(1, size // k.shape[1])
    k, v = (t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (k, v))
    order = placement.flatten()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    whole = [_to_heads(t, group, size)[back] for t in (q, k, v)]
    out = attention(*whole, kv_end=kv_end, scale=scale)
    return _to_rows(out[order], group, size)


def _to_heads(tensor: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """[n, H, D] of each rank -> [T, H / R, D], rows in the order of ranks."""
    split = tensor.unflatten(1, (size, -1)).transpose(0, 1)  # [R, n, H / R, D]
    exchanged: Tensor = _Exchange.apply(split, group)
    return exchanged.flatten(0, 1)


def _to_rows(tensor: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """The inverse of _to_heads."""
    exchanged: Tensor = _Exchange.apply(tensor.unflatten(0, (size, -1)), group)
    return exchanged.transpose(0, 1).flatten(1, 2)


def _all_gather(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> list[Tensor]:
    """[n, ...] of each rank -> [T, ...] in the order of ranks."""
    gathered = []
    for tensor in tensors:
        out = tensor.new_empty((dist.get_world_size(group) * len(tensor), *tensor.shape[1:]))
        dist.all_gather_single(out, tensor.contiguous(), group=group)
        gathered.append(out)
    return gathered


def _sum_scatter(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """[T, ...] of each rank -> this rank's [n, ...] of their sum, added in the order of ranks."""
    size = dist.get_world_size(group)
    return [_all_to_all(t.unflatten(0, (size, -1)), group).sum(dim=0) for t in tensors]


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = tensor.contiguous()
    out = torch.empty_like(sent)
    dist.all_to_all_single(out, sent, group=group)
    return out


def _check(q: Tensor, k: Tensor, kv_end: Tensor, placement: Tensor, group: dist.ProcessGroup, scheme: str) -> None:
    size = dist.get_world_size(group)
    if scheme not in SCHEMES:
        raise ConfigError(f"scheme={scheme!r} is unknown: use one of {', '.join(SCHEMES)}")
    if placement.shape != (size, len(q)) or kv_end.shape != (size * len(q),):
        raise ValueError(
            f"placement {list(placement.shape)} and kv_end {list(kv_end.shape)} do not fit {size} ranks of {len(q)} "
            "rows: they must be [ranks, rows] and [ranks * rows]"
        )
    if scheme == "heads" and not heads_divide(q.shape[1], k.shape[1], size):
        raise ValueError(
            f"scheme='heads' cannot split {q.shape[1]} query and {k.shape[1]} key heads over {size} ranks: use 'gather'"
        )
