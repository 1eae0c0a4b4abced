"""`core_attention` of a megatron-core layer: rotary embedding and interval-mask attention of packed rows, without TE.

Megatron's own DotProductAttention refuses packed rows, and Transformer Engine's fused rotary embedding has no attention
factor, so YaRN falls back to several elementwise passes there. Here both happen inside core attention: build the model
with position_embedding_type="none", then queries and keys arrive unturned (after q/k norms) and ops.rope turns them by
their position ids.

    config = TransformerConfig(...)
    spec = layer_spec(rope=rope, qk_layernorm=True)     # get_gpt_layer_local_spec with our core attention
    model = GPTModel(config, spec, ..., position_embedding_type="none")
    model(input_ids, position_ids, None, packed_seq_params=packed_params(batch))

Under tensor parallelism a rank gets its share of the heads and the whole row, under sequence parallelism as well; under
context parallelism some rows of it, and attention gathers the keys of the others (ops.context_parallel). Works under
selective and full activation recomputation: it holds no state.
Letters: t tokens of the row, s sequence length, b batch, h query heads and g key-value heads of this rank, d head dim.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swe_rl import ops
from swe_rl.errors import ConfigError
from swe_rl.ops.context_parallel import context_attention

if TYPE_CHECKING:
    from swe_rl.models.rope import Rope
    from swe_rl.types import PackedBatch

SUPPORTED = "only causal self-attention of packed or whole sequences without dropout is supported"


class PackedCoreAttention(nn.Module):
    """Fits `SelfAttentionSubmodules.core_attention` of megatron-core 0.16.1 and newer; no parameters.

    The constructor takes what Megatron passes, and rope (None: queries and keys are not turned), attention_impl and
    rope_impl, the `impl` of ops.attention and ops.rope. Raises ConfigError for what it would silently get wrong.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        rope: Rope | None = None,
        attention_impl: str = "auto",
        rope_impl: str = "auto",
    ) -> None:
        super().__init__()
        _check_config(config, attention_type, attention_dropout)
        self.layer_number, self.attn_mask_type = layer_number, attn_mask_type
        self.softmax_scale = softmax_scale
        self.attention_impl, self.rope_impl = attention_impl, rope_impl
        self.context_group: Any = pg_collection.cp if config.context_parallel_size > 1 else None
        self.head_dim = config.kv_channels
        self.set_rope(rope)

    def set_rope(self, rope: Rope | None) -> None:
        """Turns queries and keys by `rope` from now on. ConfigError when a head has not as many dimensions."""
        if rope is not None and rope.dim > self.head_dim:
            raise ConfigError(f"the rotary embedding turns {rope.dim} dimensions, a head has {self.head_dim}")
        self.attention_factor = 1.0 if rope is None else rope.scaling
        # Kept apart from buffers: model.bfloat16() would round it.
        self._frequencies = None if rope is None else rope.inv_freq()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Packed (qkv_format "thd"): query [t, h, d], key and value [t, g, d] -> [t, h d]. Otherwise query
        [s, b, h, d], key and value [s, b, g, d] -> [s, b, h d], each sequence of the batch causal. The tensor
        attention_mask is what its type says and is not read.

        Raises ConfigError for another mask or a bias, ValueError for packed parameters that do not fit.
        """
        kind = getattr(attn_mask_type or self.attn_mask_type, "name", "causal")
        causal = ("causal",) if packed_seq_params is None else ("causal", "padding_causal")
        if attention_bias is not None or kind not in causal:
            raise ConfigError(f"core attention got attn_mask_type={kind} or a bias: {SUPPORTED}")
        if packed_seq_params is not None:
            if packed_seq_params.qkv_format != "thd":
                raise ConfigError(f"packed_seq_params.qkv_format={packed_seq_params.qkv_format!r}: use 'thd'")
            if self.context_group is not None:
                return self._part_of_row(query, key, value, packed_seq_params).flatten(1)
            kv_end, positions = row_mask(packed_seq_params, len(query), query.device)
            return self._row(query, key, value, kv_end, positions).flatten(1)
        if self.context_group is not None:
            raise ConfigError("context parallelism needs packed rows: pass packed_seq_params with context_rows")
        length, batch = query.shape[:2]
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))  # sequence by sequence
        index = torch.arange(length * batch, device=query.device)
        kv_end = ((index // length + 1) * length).to(torch.int32)
        out = self._row(q, k, v, kv_end, index % length)
        return out.unflatten(0, (batch, length)).transpose(0, 1).flatten(2).contiguous()

    def _row(self, q: Tensor, k: Tensor, v: Tensor, kv_end: Tensor, positions: Tensor) -> Tensor:
        q, k = self._turned(q, k, positions)
        return ops.attention(q, k, v, kv_end=kv_end, scale=self.softmax_scale, impl=self.attention_impl)

    def _part_of_row(self, q: Tensor, k: Tensor, v: Tensor, params: Any) -> Tensor:
        """This rank has some rows, params.context_rows says which; kv_end is of the whole. Collective."""
        if getattr(params, "context_rows", None) is None:
            raise ConfigError("context parallelism needs packed_seq_params.context_rows: make them with packed_params")
        q, k = self._turned(q, k, params.position_ids)
        return context_attention(
            q,
            k,
            v,
            kv_end=params.kv_end,
            placement=params.context_rows,
            group=self.context_group,
            scale=self.softmax_scale,
        )

    def _turned(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._frequencies is None:
            return q, k
        self._frequencies = self._frequencies.to(q.device)
        return ops.rope(q, k, positions, self._frequencies, attention_factor=self.attention_factor, impl=self.rope_impl)


def _check_config(config: Any, attention_type: str, dropout: float | None) -> None:
    """ConfigError for settings of Megatron that this core attention does not have."""
    dropout = config.attention_dropout if dropout is None else dropout
    if dropout:
        raise ConfigError(f"attention_dropout={dropout}: {SUPPORTED}, set it to 0")
    if attention_type != "self":
        raise ConfigError(f"attention_type={attention_type!r}: {SUPPORTED}")
    for key, plain in (
        ("window_size", None),
        ("softmax_type", "vanilla"),
        ("apply_query_key_layer_scaling", False),
        ("multi_latent_attention", False),
    ):
        if getattr(config, key, plain) != plain:
            raise ConfigError(f"{key}={getattr(config, key)!r} is not supported by core attention: set it to {plain!r}")


def row_mask(params: Any, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(kv_end [t] i32, position_ids [t]) of packed_seq_params: its attributes of these names, which trees have, or
    those of plain documents from cu_seqlens_q, padded or not. Tokens outside of them are padding. ValueError if they
    do not fit."""
    kv_end, positions = getattr(params, "kv_end", None), getattr(params, "position_ids", None)
    if kv_end is None:
        if params.cu_seqlens_q is None:
            raise ValueError("packed_seq_params has neither kv_end nor cu_seqlens_q: make it with packed_params")
        borders = params.cu_seqlens_q.to(device).long()
        starts = borders if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded.to(device).long()
        starts, index = starts[:-1], torch.arange(num_tokens, device=device)
        document = torch.searchsorted(starts, index, right=True) - 1
        ends = (starts + borders.diff())[document]
        kv_end = torch.where(index < ends, ends, index).to(torch.int32)
        positions = index - starts[document] if positions is None else positions
    if positions is None:
        raise ValueError("packed_seq_params has kv_end and no position_ids: depths in a tree are not indices")
    if kv_end.shape != (num_tokens,) or positions.shape != (num_tokens,):
        raise ValueError(
            f"kv_end is {list(kv_end.shape)}, position_ids {list(positions.shape)}, the row has {num_tokens} tokens: "
            "they must agree; under sequence parallelism they belong to the whole row"
        )
    return kv_end, positions


def packed_params(batch: PackedBatch) -> Any:
    """megatron-core's PackedSeqParams of a packed row, with kv_end and position_ids as attributes beside its own.

    Tensors, because recomputation keeps tensors; attributes, because the class has no field for a mask by intervals.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [stop - start for start, stop in pairwise(batch.cu_seqlens_host)]
    params: Any = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=max(lengths, default=0),
        max_seqlen_kv=max(lengths, default=0),
    )
    params.kv_end, params.position_ids, params.context_rows = batch.kv_end, batch.position_ids, batch.context_rows
    return params


def layer_spec(*, rope: Rope | None, attention_impl: str = "auto", rope_impl: str = "auto", **options: Any) -> Any:
    """megatron-core's local layer spec (no Transformer Engine) with PackedCoreAttention in it.

    options go to get_gpt_layer_local_spec: qk_layernorm, normalization, num_experts and so on.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(**options)
    use_core_attention(spec, rope=rope, attention_impl=attention_impl, rope_impl=rope_impl)
    return spec


def use_core_attention(spec: Any, *, rope: Rope | None, attention_impl: str = "auto", rope_impl: str = "auto") -> None:
    """Puts PackedCoreAttention into a layer spec, in place. ConfigError for a spec without self-attention."""
    attention: Any = getattr(getattr(spec.submodules, "self_attention", None), "submodules", None)
    if not hasattr(attention, "core_attention"):
        raise ConfigError(f"the layer spec of {getattr(spec, 'module', spec)} has no self_attention.core_attention")
    attention.core_attention = functools.partial(
        PackedCoreAttention, rope=rope, attention_impl=attention_impl, rope_impl=rope_impl
    )
