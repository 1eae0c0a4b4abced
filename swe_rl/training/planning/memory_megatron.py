"""Peak memory of a Megatron rank, by component.

Activations follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198, section 4), changed for what is trained here: no dropout, attention that keeps no scores (their 5as/h
term is gone), grouped queries, a gated MLP, q/k norms, RMSNorm. Sequence parallelism goes with tensor parallelism, so
that all activations of a layer are cut by it. Optimizer states follow ZeRO stage 1 (arXiv:1910.02054): they are cut
over data and context parallel ranks, parameters and fp32 gradients are not. Pipeline: 1F1B, the first stage holds the
activations of `pipeline` micro-batches (arXiv:2104.04473, section 2.2).
Letters: h hidden, q and kv elements of queries and of keys, f rows of the MLP, e bytes of an element, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from swe_rl.training.planning.parallel_layouts import ParallelLayout
from swe_rl.training.planning.parts import BYTES, Part, billions, total
from swe_rl.training.planning.shapes import ModelShape

GIB = 1 << 30
# Of ops.triton_rows: a chunk of the head holds fp32 logits and bf16 gradients of them.
HEAD_CHUNK_BYTES, HEAD_MIN_ROWS, HEAD_MAX_ROWS, HEAD_ROW_BYTES = 4 << 30, 1024, 8192, 6
CONTEXT_BYTES = int(1.0 * GIB)  # CUDA context, cuBLAS workspaces, code
COMMUNICATOR_BYTES = GIB // 4  # NCCL buffers of one group
FRAGMENTATION = 0.05  # of what is allocated and freed within a step
VOCAB_MULTIPLE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What memory depends on beside model and layout."""

    row_tokens: int  # of a micro-batch, over all context parallel ranks
    rows_per_rank: int  # micro-batches of a data parallel rank in one optimizer step
    trained_share: float  # of the tokens
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    reference: bool = False  # a copy of the weights for the KL penalty
    fused: bool = True  # kernels of norms and of the gated MLP that keep nothing between
    engine_sleeps: bool = False  # colocated: a vLLM process that has let go of weights and cache keeps its context


def rank_params(shape: ModelShape, layout: ParallelLayout, stage: int) -> tuple[int, int]:
    """Elements that a rank of a pipeline stage holds: (shared by all data parallel ranks, in experts)."""
    layers = shape.num_layers // layout.pipeline
    mine = range(stage * layers, (stage + 1) * layers)
    sparse = sum(shape.has_experts(layer) for layer in mine)
    router = shape.hidden * shape.num_experts
    shared = layers * (shape.attention_matrices // layout.tensor + shape.layer_vectors)
    shared += (layers - sparse) * shape.dense_mlp // layout.tensor + sparse * router
    experts = sparse * shape.num_experts * shape.expert_mlp // (layout.expert * layout.tensor)
    vocab = -(-shape.vocab // (VOCAB_MULTIPLE * layout.tensor)) * VOCAB_MULTIPLE * shape.hidden
    first, last = stage == 0, stage == layout.pipeline - 1
    shared += vocab * (first + last - (first and last and shape.tied)) + last * shape.hidden
    return shared, experts


def layer_bytes(shape: ModelShape, *, recompute: str, dtype_bytes: int, fused: bool = True) -> int:
    """Bytes per token that all tensor parallel ranks together keep of one layer for the backward pass.

    none: e (4h + 3q + 3kv [+ q with q/k norms] + 3f) + 4 per query head: input and output of both norms; queries, keys
    and values as projected (values are a view of all three), both turned, [queries gathered from their groups,] the
    output; the two halves of the MLP and their product; log-sum-exps. selective leaves norm outputs and MLP out, full
    and offload keep the input alone. A mixture of experts has k times (2h + 3 f_e) for 3f. Without `fused` kernels (on
    a CPU) a norm keeps its input and the normalised one in fp32, and the MLP two more products.
    """
    e = dtype_bytes
    if recompute in ("full", "offload"):
        return e * shape.hidden
    kept = e * (3 * shape.q_size + 3 * shape.kv_size) + 4 * shape.num_heads
    if shape.qk_norm:
        kept += e * shape.q_size if fused or e == 4 else 0
        kept += 0 if fused else (shape.q_size + shape.kv_size) * (4 if e == 4 else 8)
    kept += 2 * shape.hidden * (e if fused else 8)
    if recompute == "none":
        kept += e * (2 * shape.hidden + _mlp_elements(shape) + (0 if fused else 2 * shape.intermediate))
    return kept


def _mlp_elements(shape: ModelShape) -> int:
    """Kept per token by the MLP of the widest layer, beside its input."""
    dense = 3 * shape.intermediate if shape.num_expert_layers < shape.num_layers else 0
    sparse = shape.experts_per_token * (2 * shape.hidden + 3 * shape.expert_intermediate)
    return max(dense, sparse)


def working_bytes(shape: ModelShape, layout: ParallelLayout, *, tokens: int, work: Work) -> int:
    """Of the layer whose backward pass runs: what it computes again, gradients, and gathered inputs and keys."""
    size = BYTES[work.dtype]
    again = layer_bytes(shape, recompute="none", dtype_bytes=size, fused=work.fused)
    again -= layer_bytes(shape, recompute=layout.recompute, dtype_bytes=size, fused=work.fused)
    gradients = size * (2 * shape.hidden + _mlp_elements(shape))
    gathered = 2 * size * shape.hidden if layout.tensor > 1 else 0  # of sequence parallel shards, input and gradient
    keys = 0
    if layout.context > 1:  # all keys and values of the row, and their gradients
        keys = 4 * size * shape.kv_size * work.row_tokens // layout.tensor
    return tokens * ((again + gradients) // layout.tensor + gathered) + keys


def head_bytes(shape: ModelShape, layout: ParallelLayout, *, tokens: int, work: Work) -> int:
    """Of the chunked head: rows of trained tokens and their gradients, and the logits of one chunk."""
    rows = max(int(tokens * work.trained_share), 1)
    vocab = -(-shape.vocab // layout.tensor)
    fit = HEAD_CHUNK_BYTES // (HEAD_ROW_BYTES * vocab)
    chunk = min(rows, max(min(fit, HEAD_MAX_ROWS), HEAD_MIN_ROWS))
    return 2 * BYTES[work.dtype] * rows * shape.hidden + HEAD_ROW_BYTES * chunk * vocab


def stage_memory(shape: ModelShape, layout: ParallelLayout, work: Work, stage: int) -> list[Part]:
    """Components of one rank of a pipeline stage."""
    size, tokens = BYTES[work.dtype], work.row_tokens // layout.context
    shared, experts = rank_params(shape, layout, stage)
    count = shared + experts
    parts = [Part("parameters", size * count, f"{size} B x {billions(count)}")]
    parts.append(Part("gradients", 4 * count, f"4 B x {billions(count)} (fp32)"))
    parts.append(_optimizer(layout, work, shared, experts))
    if work.reference:
        parts.append(Part("reference", size * count, f"{size} B x {billions(count)} (KL penalty)"))
    layers = shape.num_layers // layout.pipeline
    flying = min(layout.pipeline - stage, work.rows_per_rank)
    each = layer_bytes(shape, recompute=layout.recompute, dtype_bytes=size, fused=work.fused)
    kept = layers * flying if layout.recompute != "offload" else min(2, layers)
    stored = tokens * each // layout.tensor * kept
    working = working_bytes(shape, layout, tokens=tokens, work=work)
    how = f"{tokens} tokens x {each} B / TP{layout.tensor} x {kept} layers + {working / GIB:.2f} GiB at work"
    parts.append(Part("activations", stored + working, how))
    if stage == layout.pipeline - 1:
        head = head_bytes(shape, layout, tokens=tokens, work=work)
        parts.append(Part("logits", head, f"a chunk of rows x {-(-shape.vocab // layout.tensor)} of the vocabulary"))
    groups = sum(axis > 1 for axis in (layout.tensor, layout.context, layout.pipeline, layout.data, layout.expert))
    moving = int(FRAGMENTATION * (stored + working))
    buffers = CONTEXT_BYTES * (2 if work.engine_sleeps else 1) + COMMUNICATOR_BYTES * groups + moving
    parts.append(Part("buffers", buffers, f"context, {groups} communicators, {FRAGMENTATION:.0%} fragmentation"))
    return parts


def _optimizer(layout: ParallelLayout, work: Work, shared: int, experts: int) -> Part:
    """fp32 masters (unless the parameters are fp32) and AdamW's two moments, cut as ZeRO stage 1."""
    each = 8 + (4 if BYTES[work.dtype] < 4 else 0)
    ranks = layout.data * layout.context
    mine = shared / ranks + experts / (ranks // layout.expert)
    if layout.offload:
        return Part("optimizer", 0, f"{each} B x {billions(mine)} in host memory")
    return Part("optimizer", int(each * mine), f"{each} B x {billions(mine)} of DP{layout.data} x CP{layout.context}")


def rank_memory(shape: ModelShape, layout: ParallelLayout, work: Work) -> list[Part]:
    """Components of the rank that needs most: the first stage keeps most activations, the last one has the head."""
    stages = {0, layout.pipeline - 1}
    return max((stage_memory(shape, layout, work, stage) for stage in sorted(stages)), key=total)


def host_memory(shape: ModelShape, layout: ParallelLayout, work: Work) -> int:
    """Bytes in host memory of one rank: offloaded optimizer states, offloaded inputs of layers."""
    found = 0
    if layout.offload:
        each = 8 + (4 if BYTES[work.dtype] < 4 else 0)
        ranks = layout.data * layout.context
        for stage in {0, layout.pipeline - 1}:
            shared, experts = rank_params(shape, layout, stage)
            found = max(found, int(each * (shared / ranks + experts / (ranks // layout.expert))))
    if layout.recompute == "offload":
        tokens = work.row_tokens // layout.context
        flying = min(layout.pipeline, work.rows_per_rank) * (shape.num_layers // layout.pipeline)
        found += tokens * BYTES[work.dtype] * shape.hidden // layout.tensor * flying
    return found
