"""Attention as a plan of tiles over torch's own attention kernel of the CPU, merged by the log-sum-exp of each row.

Memory is linear in T: the kernel works in blocks, and the backward pass stores q, k, v, out and lse only. It hands
the LSE of all tiles, and the output of all, to the kernel's backward, so that each tile's gradient is exact by itself.
Letters: T tokens, G query heads that share a key head, D head dim. One call has shape [Hkv, G, rows, D]: the keys are
expanded over G without a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swe_rl.ops.attention_facts import MaskFacts
from swe_rl.ops.attention_mask import Tile, tile_mask

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(q: Tensor, k: Tensor, v: Tensor, mask: MaskFacts, scale: float) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, D], lse [Hq, T] fp32 or fp64). Rows of several tiles are computed and merged in fp32."""
    tiles, kv_end = mask.tiles, mask.host
    dtype = _compute_dtype(q, tiles)
    out = q.new_zeros(q.shape, dtype=dtype)
    lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    heads = k.shape[1]
    query, key, value, result = (_by_heads(t.to(dtype), heads) for t in (q, k, v, out))
    normalizer = lse.unflatten(0, (heads, -1))
    for tile in tiles:
        options, hidden = _masks(tile, kv_end, dtype)
        part = [t[:, :, tile.keys].expand(-1, query.shape[1], -1, -1) for t in (key, value)]
        rows = _rows(query, tile, hidden)
        found, top = _forward(rows, *part, 0.0, tile.kind == "causal", scale=scale, **options)
        if hidden is not None:  # the kernel says 0
            top = top.masked_fill(hidden, -torch.inf)
        _merge(result[:, :, tile.rows], normalizer[:, :, tile.rows], found, top, fresh=tile.fresh)
    return out.to(q.dtype), lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskFacts, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v for `grad` of out; sums over tiles and over the G heads are fp32 (fp64)."""
    tiles, kv_end, heads = mask.tiles, mask.host, k.shape[1]
    dtype = _compute_dtype(q, tiles)
    wide = torch.promote_types(q.dtype, torch.float32)
    grads = [torch.zeros(t.shape, dtype=dtype if t is q else wide) for t in (q, k, v)]
    d_query, d_key, d_value = (_by_heads(t, heads) for t in grads)
    query, key, value, result, d_result = (_by_heads(t.to(dtype), heads) for t in (q, k, v, out, grad))
    # A row that sees nothing has probability exp(score - inf) = 0 everywhere.
    normalizer = lse.masked_fill(lse == -torch.inf, torch.inf).unflatten(0, (heads, -1))
    for tile in tiles:
        rows, keys = tile.rows, tile.keys
        options, hidden = _masks(tile, kv_end, dtype)
        shared = query.shape[1]
        part = [t[:, :, keys].expand(-1, shared, -1, -1) for t in (key, value)]
        found = _backward(
            _rows(d_result, tile, hidden),
            _rows(query, tile, hidden),
            *part,
            result[:, :, rows],
            normalizer[:, :, rows],
            0.0,
            tile.kind == "causal",
            scale=scale,
            **options,
        )
        if tile.fresh:
            d_query[:, :, rows] = found[0]
        else:
            d_query[:, :, rows] += found[0]
        for total, one in ((d_key, found[1]), (d_value, found[2])):
            total[:, :, keys] += one.sum(dim=1, keepdim=True, dtype=wide)  # keys of a tile are distinct
    return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)


def _compute_dtype(q: Tensor, tiles: list[Tile]) -> torch.dtype:
    """That of q where every row has one tile; otherwise outputs are merged, which needs fp32."""
    return q.dtype if all(tile.fresh for tile in tiles) else torch.promote_types(q.dtype, torch.float32)


def _by_heads(tensor: Tensor, heads: int) -> Tensor:
    """View [Hkv, G, T, D] of [T, Hkv * G, D]; a copy where D is strided, which the kernel would not see."""
    if tensor.stride(2) != 1:
        tensor = tensor.contiguous()
    return tensor.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)


def _masks(tile: Tile, kv_end: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor | None]:
    """(argument with the additive mask, [rows] bool whether a row sees none of the keys) of a masked tile; every row of
    another tile sees some."""
    if tile.kind != "masked":
        return {}, None
    mask = tile_mask(tile, kv_end)
    return {"attn_mask": torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)}, ~mask.any(dim=1)


def _rows(tensor: Tensor, tile: Tile, hidden: Tensor | None) -> Tensor:
    """The tile's rows of [Hkv, G, T, D], `hidden` ones as 0: padding may hold NaN, and 0 times NaN is NaN."""
    rows = tensor[:, :, tile.rows]
    return rows if hidden is None else rows.masked_fill(hidden[:, None], 0.0)


def _merge(out: Tensor, lse: Tensor, found: Tensor, top: Tensor, *, fresh: bool) -> None:
    """Adds a tile to out [Hkv, G, rows, D] and lse [Hkv, G, rows], in place: both are means weighted by exp(lse)."""
    if fresh:
        out.copy_(found)
        lse.copy_(top)
        return
    both = torch.logaddexp(lse, top)
    origin = both.masked_fill(both == -torch.inf, 0.0)
    out.mul_((lse - origin).exp()[..., None]).addcmul_(found, (top - origin).exp()[..., None].to(out.dtype))
    lse.copy_(both)
