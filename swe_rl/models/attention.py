"""Two attention functions for transformers models: packed documents (trainer) and cache slots (engine).

A transformers model passes unknown keyword arguments of its forward down to the attention function. That is how the
context of a call travels: `packed_segments=PackedSegments(...)` for "swe_rl_packed", `slot_rows=SlotRows(...)` for
"swe_rl_slots". There is no global state, so several models and threads do not see each other.

"swe_rl_packed" computes each document alone by torch's scaled_dot_product_attention, or, where the context carries
`kv_end`, the whole row by ops.attention under the interval mask: documents, trees and padding alike.

Letters: T packed tokens, R rows (one token of some slot each), S slots, C cache length, Hq query heads, Hkv key-value
heads, D head dim, L layers. Query head h reads key-value head h // (Hq / Hkv), as in transformers' repeat_kv.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swe_rl import ops
from swe_rl.ops.context_parallel import ContextGroup, context_attention

PACKED = "swe_rl_packed"
SLOTS = "swe_rl_slots"

LINE_HEADS = 8  # query heads whose two floats each, see attend_alone, fill a line of the cache
# A span is the number of keys that one call looks at. The CPU kernel of scaled_dot_product_attention walks over keys in
# blocks of SPAN_BLOCK: more whole blocks are fully masked ones, which change no bit. Within the last block, sizes up to
# FINE_SPAN_LIMIT were found to give the bits of a whole block, larger ones not; the engine checks the former when it
# starts (inference.probe) and does without where it fails.
SPAN_BLOCK = 512
FINE_SPAN_LIMIT = 256
FINE_SPAN_STEP = 64


@dataclass(frozen=True, slots=True)
class PackedSegments:
    """Document borders of one packed row, on the host: document s holds tokens cu_seqlens[s] to cu_seqlens[s + 1].

    With kv_end [T] i32 the row goes to ops.attention by `impl`, and the borders are not looked at. With `context` the
    query, key and value are those of this rank's rows context_rows[rank] of the T.
    """

    cu_seqlens: tuple[int, ...]
    kv_end: Tensor | None = None
    impl: str = "auto"
    context: ContextGroup | None = None
    context_rows: Tensor | None = None


class SlotCache:
    """Preallocated keys and values, [L, S, Hkv, C, D] each. Position `max_context` takes the writes of padding rows."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_context: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Room for every span and for padding; whole cache lines per head, so that all slots are aligned alike.
        length = max(_round_up(max_context, SPAN_BLOCK), _round_up(max_context + 1, 16))
        shape = (num_layers, num_slots, num_kv_heads, length, head_dim)
        self.max_context = max_context
        self.fine_spans = False
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def clear(self) -> None:
        """Zeroes everything: a masked weight of 0 times a stale NaN would still be NaN."""
        self.keys.zero_()
        self.values.zero_()

    def span(self, length: int) -> int:
        """Keys to look at so that `length` are covered and the bits of a row do not depend on it."""
        whole, rest = length // SPAN_BLOCK * SPAN_BLOCK, length % SPAN_BLOCK
        if self.fine_spans and rest <= FINE_SPAN_LIMIT:
            return whole + _round_up(rest, FINE_SPAN_STEP)
        return _round_up(length, SPAN_BLOCK)

    def copy_prefix(self, *, source: int, target: int, length: int) -> None:
        """Gives slot `target` the first `length` keys and values of slot `source`."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def additive_mask(positions: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    """0 up to and including each row's position, -inf behind it: positions [R] -> [R, 1, 1, span]."""
    visible = torch.arange(span, device=positions.device)[None, :] <= positions[:, None]
    return torch.where(visible, 0.0, float("-inf")).to(dtype)[:, None, None, :]


@dataclass(frozen=True, slots=True)
class SlotBlock:
    """Rows [row_start, row_stop) read slots [slot_start, slot_stop): one slot for all of them, or one slot each."""

    row_start: int
    row_stop: int
    slot_start: int
    slot_stop: int
    mask: Tensor  # [rows, 1, 1, span] additive, in the dtype of the model


@dataclass(slots=True)
class SlotRows:
    """Where the R rows of one engine call live in the cache."""

    cache: SlotCache
    slot_ids: Tensor  # [R] i64
    positions: Tensor  # [R] i64, also the position ids
    blocks: list[SlotBlock] = field(default_factory=list)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    packed_segments: PackedSegments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document; the maths of a document is that of the document alone.

    query [B, Hq, T, D], key and value [B, Hkv, T, D] -> [B, T, Hq, D]. B is 1 with `packed_segments`; without, every
    row is one document. On a CPU gradients are computed in fp32: torch's bf16 backward kernel is ten times slower.
    """
    dtype = query.dtype
    if dtype != torch.float64 and query.device.type == "cpu" and query.requires_grad:
        query, key, value = query.float(), key.float(), value.float()
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        raise ValueError(f"{PACKED} takes whole documents: no attention mask, no key-value cache")
    if packed_segments is not None and packed_segments.kv_end is not None:
        if dropout:
            raise ValueError(f"dropout={dropout} in attention is not supported: set it to 0 in the model's config")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        mask, impl = packed_segments.kv_end, packed_segments.impl
        if packed_segments.context is not None:
            return _split_attention(q, k, v, packed_segments, scaling)[None].to(dtype), None
        return ops.attention(q, k, v, kv_end=mask, scale=scaling, impl=impl)[None].to(dtype), None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    borders = packed_segments.cu_seqlens if packed_segments is not None else (0, query.shape[2])
    lengths = [stop - start for start, stop in pairwise(borders)]
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    outs = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling) for q, k, v in parts
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out.transpose(1, 2).to(dtype), None


def _split_attention(q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scaling: float) -> Tensor:
    """[n, Hq, D] of this rank's rows, together with the other ranks of the context."""
    assert segments.context is not None
    assert segments.kv_end is not None
    assert segments.context_rows is not None  # packed_forward gives all three
    group, scheme = segments.context.group, segments.context.scheme
    placement = segments.context_rows
    return context_attention(
        q, k, v, kv_end=segments.kv_end, placement=placement, group=group, scheme=scheme, scale=scaling
    )


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    slot_rows: SlotRows,
    **_: Any,
) -> tuple[Tensor, None]:
    """Writes the R new keys and values to their slots, then every row attends to its own slot up to its position.

    query [1, Hq, R, D], key and value [1, Hkv, R, D] -> [1, R, Hq, D]. The query heads that share a key-value head
    form the rows of one small product, so each (row, key-value head) is computed alone: its bits depend on neither
    the other rows nor its place among them.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = slot_rows.cache.keys[layer], slot_rows.cache.values[layer]
    num_rows, num_kv_heads, head_dim = query.shape[2], keys.shape[1], query.shape[3]
    keys[slot_rows.slot_ids, :, slot_rows.positions] = key[0].transpose(0, 1)
    values[slot_rows.slot_ids, :, slot_rows.positions] = value[0].transpose(0, 1)
    grouped = query[0].transpose(0, 1).reshape(num_rows, num_kv_heads, -1, head_dim)
    out = torch.zeros_like(grouped)
    for block in slot_rows.blocks:
        rows, span = block.row_stop - block.row_start, block.mask.shape[-1]
        k = keys[block.slot_start : block.slot_stop, :, :span].expand(rows, -1, -1, -1)
        v = values[block.slot_start : block.slot_stop, :, :span].expand(rows, -1, -1, -1)
        q = grouped[block.row_start : block.row_stop]
        out[block.row_start : block.row_stop] = attend_alone(q, k, v, mask=block.mask, scale=scaling)
    return out.reshape(1, num_rows, -1, head_dim), None


def attend_alone(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, scale: float | None = None) -> Tensor:
    """Attention whose bits, for one (row, key-value head), depend on no other: query [R, Hkv, G, D], key and value
    [R, Hkv, S, D], mask [R, 1, 1, S] -> [R, Hkv, G, D].

    The CPU kernel gives every thread a buffer of G * (S + D + 2) floats, one behind the other, and its products round
    by how theirs begins in a line of the cache: which thread a row falls to would show, unless G is a multiple of 8.
    """
    heads = query.shape[2]
    if query.device.type == "cpu" and torch.get_num_threads() > 1:
        query = F.pad(query, (0, 0, 0, -heads % LINE_HEADS))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)[:, :, :heads]


def register() -> None:
    """Makes both functions known to transformers by name. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
    AttentionInterface.register(SLOTS, slot_attention)
