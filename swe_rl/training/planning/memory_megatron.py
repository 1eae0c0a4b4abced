"""Peak memory of a Megatron rank, by component.

Activations follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198, section 4), changed for what is trained here: no dropout, attention that keeps no scores (their 5as/h
term is gone), grouped queries, a gated MLP, q/k norms, and norms and gates of single operations, as the backend has
them. Sequence parallelism goes with tensor parallelism, so that all activations of a layer are cut by it. Optimizer
states follow ZeRO stage 1 (arXiv:1910.02054): they are cut over data and context parallel ranks, parameters and fp32
gradients are not. Pipeline: 1F1B or interleaved, see `layers_kept` (arXiv:2104.04473, section 2.2).
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
    engine_sleeps: bool = False  # colocated: a vLLM process that has let go of weights and cache keeps its context


def rank_params(shape: ModelShape, layout: ParallelLayout, stage: int) -> tuple[int, int]:
    """Elements that a rank of a pipeline stage holds: (shared by all data parallel ranks, in experts)."""
    layers = shape.num_layers // layout.pipeline
    each = layers // layout.virtual  # of a chunk; chunks are dealt out in turns
    mine = (
        chunk * each + i
        for chunk in range(stage, layout.pipeline * layout.virtual, layout.pipeline)
        for i in range(each)
    )
    sparse = sum(shape.has_experts(layer) for layer in mine)
    router = shape.hidden * shape.num_experts
    shared = layers * (shape.attention_matrices // layout.tensor + shape.layer_vectors)
    shared += (layers - sparse) * shape.dense_mlp // layout.tensor + sparse * router
    experts = sparse * shape.num_experts * shape.expert_mlp // (layout.expert * layout.tensor)
    vocab = -(-shape.vocab // (VOCAB_MULTIPLE * layout.tensor)) * VOCAB_MULTIPLE * shape.hidden
    first, last = stage == 0, stage == layout.pipeline - 1
    shared += vocab * (first + last - (first and last and shape.tied)) + last * shape.hidden
    return shared, experts


def layer_bytes(shape: ModelShape, *, recompute: str, dtype_bytes: int, tensor: int = 1) -> int:
    """Bytes per token that all tensor parallel ranks together keep of one layer for the backward pass.

    none: queries, keys and values as projected (values are a view of all three), queries and keys turned, the output,
    e (3q + 3kv), and 4 per query head for log-sum-exps; of a norm over n elements the input in fp32 and the normalised
    one, (4 + e) n, and its output, where a product takes it; of the MLP its two halves, the gate's, a copy of the other
    half and the product, 5f. A mixture of k experts of f_e rows has k (6 f_e + h) for 5f: products are weighted, inputs
    are copied for each, on every tensor parallel rank; and of the router logits, weights and choices, 9 + e each.
    selective leaves outputs of norms and the MLP out, full and offload keep the input alone.
    """
    e = dtype_bytes
    if recompute in ("full", "offload"):
        return e * shape.hidden
    normed = 2 * shape.hidden + (shape.q_size + shape.kv_size if shape.qk_norm else 0)
    kept = e * (3 * shape.q_size + 3 * shape.kv_size) + 4 * shape.num_heads + (4 + e) * normed
    if recompute == "none":
        kept += e * (2 * shape.hidden + _mlp_elements(shape, tensor=tensor, kept=True)) + (9 + e) * shape.num_experts
    return kept


def _mlp_elements(shape: ModelShape, *, tensor: int, kept: bool) -> int:
    """Per token of the MLP of the widest layer, beside its input: what it keeps, or its gradients that are there at
    once, of the product and of the two halves."""
    dense = (5 if kept else 3) * shape.intermediate if shape.num_expert_layers < shape.num_layers else 0
    sparse = shape.experts_per_token * (tensor * shape.hidden + (6 if kept else 3) * shape.expert_intermediate)
    return max(dense, sparse)


def working_bytes(shape: ModelShape, layout: ParallelLayout, *, tokens: int, work: Work) -> int:
    """Of the layer whose backward pass runs: what it computes again, gradients, and gathered inputs and keys."""
    size = BYTES[work.dtype]
    again = layer_bytes(shape, recompute="none", dtype_bytes=size, tensor=layout.tensor)
    again -= layer_bytes(shape, recompute=layout.recompute, dtype_bytes=size, tensor=layout.tensor)
    gradients = size * (2 * shape.hidden + _mlp_elements(shape, tensor=layout.tensor, kept=False))
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


def layers_kept(shape: ModelShape, layout: ParallelLayout, stage: int, *, rows: int) -> int:
    """Layers, each counted once per micro-batch, whose activations a rank holds when it holds most.

    p pipeline ranks with v chunks each, `rows` micro-batches. 1F1B: p - stage micro-batches. Interleaved: a rank goes
    forward through (v - 1) p + 2 (p - stage - 1) chunks before its first way back, and one more; on the first rank
    p v + p - 1 chunks of L / (p v) layers, 1 + (p - 1) / (p v) times what 1F1B keeps (arXiv:2104.04473, section 2.2).
    """
    pipeline, virtual = layout.pipeline, layout.virtual
    chunks = pipeline - stage
    if virtual > 1:
        chunks = (virtual - 1) * pipeline + 2 * (pipeline - stage - 1) + 1
    return shape.num_layers // (pipeline * virtual) * min(chunks, virtual * rows)


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
    each = layer_bytes(shape, recompute=layout.recompute, dtype_bytes=size, tensor=layout.tensor)
    kept = layers_kept(shape, layout, stage, rows=work.rows_per_rank)
    kept = min(2, kept) if layout.recompute == "offload" else kept
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
        kept = layers_kept(shape, layout, 0, rows=work.rows_per_rank)
        found += tokens * BYTES[work.dtype] * shape.hidden // layout.tensor * kept
    return found
