"""Peak memory of a rank of the torch backend, by component: transformers' modules under autograd, eager.

Counted are the tensors that autograd keeps for the backward pass of transformers' Qwen2, Qwen3 and Llama with our
packed attention, as their forward is written: an RMSNorm keeps its input in fp32, the normalised input and its output;
the MLP both halves, silu of one and the product; attention queries, keys, values, its output and a log-sum-exp per
head. On a CPU attention runs in fp32, and keys and values are repeated for every query head. The rotary
embedding keeps its two tables, once for all layers.
Letters as in memory_megatron. M trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from swe_rl.training.planning.memory_megatron import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    FRAGMENTATION,
    HEAD_CHUNK_BYTES,
    HEAD_MAX_ROWS,
    HEAD_MIN_ROWS,
    HEAD_ROW_BYTES,
    Work,
)
from swe_rl.training.planning.parallel_layouts import ParallelLayout
from swe_rl.training.planning.parts import BYTES, OPTIMIZER_BYTES, Part, billions
from swe_rl.training.planning.shapes import ModelShape

CPU_CHUNK_BYTES, CPU_CACHE_BYTES, CPU_MIN_ROWS = 128 << 20, 4 << 20, 64  # of ops.cpu_rows
COLUMNS_BYTES = 60  # of a packed row, per token: ids, positions, masks, weights, logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes per token of one layer."""

    norms: int
    attention: int
    mlp: int

    @property
    def all(self) -> int:
        return self.norms + self.attention + self.mlp


def norm_bytes(size: int, e: int) -> int:
    """Of one RMSNorm over `size` elements: fp32 input, normalised input and output in the dtype of the model."""
    return size * (4 + 2 * e)


def layer_kept(shape: ModelShape, *, dtype: str, cpu: bool, documents: bool) -> Kept:
    """`documents`: a row holds several of them, which the CPU computes one by one and joins."""
    e = BYTES[dtype]
    q, kv = shape.q_size, shape.kv_size
    attention = 0
    if shape.qk_norm:  # their outputs are turned, and turning keeps nothing but its tables
        attention += (q + kv) * (4 + e)
    if cpu:
        repeated = q if shape.num_heads > shape.num_kv_heads else kv
        attention += 4 * (q + 2 * repeated + q)
        attention += e * q if documents or e < 4 else 0  # input of the output projection, where it is a copy
    else:
        attention += e * (q + 2 * kv + q)
    attention += 4 * shape.num_heads
    if shape.num_experts:
        mlp = shape.experts_per_token * e * (2 * shape.hidden + 5 * shape.expert_intermediate)
    else:
        mlp = 4 * e * shape.intermediate
    return Kept(norms=2 * norm_bytes(shape.hidden, e), attention=attention, mlp=mlp)


def head_bytes(shape: ModelShape, work: Work, *, tokens: int, cpu: bool) -> int:
    """Of the chunked head: trained rows and their gradient, the fp32 gradient of its weight, one chunk of logits."""
    e, rows = BYTES[work.dtype], max(int(tokens * work.trained_share), 1)
    if cpu:
        cached = CPU_CACHE_BYTES // (4 * shape.vocab)
        limit = cached if cached >= 512 else max(CPU_CHUNK_BYTES // (4 * shape.vocab), CPU_MIN_ROWS)
        chunk = 4 * min(rows, limit) * shape.vocab
    else:
        fit = HEAD_CHUNK_BYTES // (HEAD_ROW_BYTES * shape.vocab)
        chunk = HEAD_ROW_BYTES * min(rows, max(min(fit, HEAD_MAX_ROWS), HEAD_MIN_ROWS)) * shape.vocab
    return 2 * e * rows * shape.hidden + 4 * shape.embedding + chunk


def rank_memory(
    shape: ModelShape, layout: ParallelLayout, work: Work, *, cpu: bool, documents: bool = True
) -> list[Part]:
    """Components at the peak: the backward pass of a micro-batch behind the first begins, older gradients are there."""
    e, count, tokens = BYTES[work.dtype], shape.num_params, -(-work.row_tokens // layout.context)
    parts = _weights(shape, layout, work)
    kept = layer_kept(shape, dtype=work.dtype, cpu=cpu, documents=documents)
    final = norm_bytes(shape.hidden, e)
    tables = 2 * e * shape.head_dim
    if layout.recompute == "none":
        each, how = shape.num_layers * kept.all, f"{shape.num_layers} layers x {kept.all} B"
    else:
        each = shape.num_layers * e * shape.hidden + kept.all
        how = f"{shape.num_layers} inputs x {e * shape.hidden} B + one layer of {kept.all} B"
    working = e * (2 * shape.intermediate + 2 * shape.hidden)
    size = tokens * (each + final + tables + working + COLUMNS_BYTES)
    parts.append(Part("activations", size, f"{tokens} tokens x ({how} + {final + tables + working} B)"))
    if layout.context > 1:  # all keys and values of the row, and their fp32 gradients
        keys = 2 * (e + 4) * shape.kv_size * work.row_tokens
        parts.append(Part("keys", keys, f"of {work.row_tokens} tokens, gathered over CP{layout.context}"))
    head = head_bytes(shape, work, tokens=tokens, cpu=cpu)
    parts.append(Part("logits", head, "chunk of logits, gradient of the head, trained rows"))
    if not cpu:
        moving = int(FRAGMENTATION * size)
        groups = COMMUNICATOR_BYTES * sum(axis > 1 for axis in (layout.data * layout.context, layout.context))
        parts.append(Part("buffers", CONTEXT_BYTES + groups + moving, f"context, {FRAGMENTATION:.0%} fragmentation"))
    if work.reference:
        parts.append(Part("reference", 4 * count // _shards(layout), f"4 B x {billions(count)} (KL penalty)"))
    return parts


def _shards(layout: ParallelLayout) -> int:
    return layout.data * layout.context if layout.sharded else 1


def _weights(shape: ModelShape, layout: ParallelLayout, work: Work) -> list[Part]:
    """fp32 masters are the parameters themselves in fp32, or when sharded; FSDP gathers one layer ahead."""
    e, count, shards = BYTES[work.dtype], shape.num_params, _shards(layout)
    working = 0 if e == 4 else e * count
    how = f"4 B x {billions(count / shards)}"
    if layout.sharded:
        roots = shape.embedding * (1 if shape.tied else 2)
        working = e * (2 * (count - roots) // shape.num_layers + roots)
        how += f" + gathered {working >> 20} MiB"
    elif working:
        how += f" masters + {e} B x {billions(count)}"
    moments = OPTIMIZER_BYTES["adamw"] * count
    if work.optimizer == "muon":
        matrices = shape.num_layers * (shape.attention_matrices + shape.dense_mlp)
        moments = OPTIMIZER_BYTES["muon"] * matrices + OPTIMIZER_BYTES["adamw"] * (count - matrices)
    return [
        Part("parameters", 4 * count // shards + working, how),
        Part("gradients", 4 * count // shards, f"4 B x {billions(count / shards)}"),
        Part("optimizer", moments // shards, f"{moments / count:.0f} B x {billions(count / shards)}"),
    ]
