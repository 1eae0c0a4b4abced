"""FLOPs and seconds of an optimizer step of the trainer, by what they are spent on.

A token is multiplied with every matrix once forward (2 FLOPs per element) and twice backward; attention of a document
of n tokens takes 4 n^2/2 FLOPs per element of the queries forward and 2.5 times that backward (FlashAttention computes
scores again: arXiv:2205.14135, section 3.1). Recomputation repeats forward passes. Communication is what is not hidden
behind arithmetic: the all-gathers and reduce-scatters of sequence parallelism (arXiv:2205.05198, section 4.2.2: four of
T h elements per layer, each way), keys and values of context parallelism, gradients and parameters of the distributed
optimizer, what stages of a pipeline send one another, tokens and their gradients on the way to experts and back; and
the bubble of the pipeline, (p - 1) / (m v) of the time for m micro-batches and v chunks on each of p ranks, which send
v times as much (arXiv:2104.04473, section 2.2), and more where p does not divide m (`_bubble`). Experts are taken to be
visited equally often.
"""

from __future__ import annotations

from dataclasses import dataclass

from swe_rl.training.planning.hardware import Device, Efficiency
from swe_rl.training.planning.memory_megatron import Work, rank_params
from swe_rl.training.planning.parallel_layouts import ParallelLayout
from swe_rl.training.planning.parts import BYTES
from swe_rl.training.planning.shapes import ModelShape

BACKWARD_ATTENTION = 2.5
# verl's documentation, a 72B model in bf16: 28.5 s as a whole, 12.5 s by changed values from shard to shard.
SYNC_BYTES_PER_S, DELTA_BYTES_PER_S = 5.1e9, 11.6e9
OPTIMIZER_TRAFFIC = 32  # bytes read and written per parameter: gradient, master, two moments, the new bf16 value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """Of one optimizer step, over all ranks."""

    documents: int
    mean_tokens: int  # of one document
    spread: float  # mean of squares over square of the mean, of the lengths
    trained_share: float

    @property
    def tokens(self) -> int:
        return self.documents * self.mean_tokens

    @property
    def pairs(self) -> float:
        """(query, key) pairs that attention looks at."""
        return self.documents * self.spread * self.mean_tokens**2 / 2


def forward_flops(shape: ModelShape, step: StepTokens) -> tuple[float, float, float]:
    """(matrices of the layers, attention, head) of a forward pass over all tokens; the head sees trained rows only."""
    matrices = 2.0 * shape.layer_matrices * step.tokens
    attention = 4.0 * shape.q_size * shape.num_layers * step.pairs
    head = 2.0 * shape.embedding * step.tokens * step.trained_share
    return matrices, attention, head


def training_seconds(
    shape: ModelShape,
    layout: ParallelLayout,
    work: Work,
    step: StepTokens,
    device: Device,
    efficiency: Efficiency,
    *,
    gpus_per_node: int,
) -> dict[str, float]:
    """Seconds of one optimizer step by cause: compute, recompute, communication, bubble, optimizer."""
    matrices, attention, head = forward_flops(shape, step)
    gpus = layout.num_gpus
    speed = device.flops * efficiency.matmul * gpus
    forward = attention / (device.flops * efficiency.attention_forward * gpus)
    backward = BACKWARD_ATTENTION * attention / (device.flops * efficiency.attention_backward * gpus)
    found = {"compute": 3 * (matrices + head) / speed + forward + backward}
    again = {"none": 0.0, "selective": matrices * _mlp_share(shape) / speed}
    found["recompute"] = again.get(layout.recompute, matrices / speed + forward)
    found["communication"] = _communication(shape, layout, work, step, device, efficiency, gpus_per_node=gpus_per_node)
    busy = sum(found.values())
    found["bubble"] = busy * _bubble(layout, max(work.rows_per_rank, 1))
    found["optimizer"] = _optimizer(shape, layout, device, efficiency)
    return found


def scoring_seconds(
    shape: ModelShape, layout: ParallelLayout, step: StepTokens, device: Device, efficiency: Efficiency
) -> float:
    """One forward pass over the tokens, as for old or reference logprobs."""
    matrices, attention, head = forward_flops(shape, step)
    speed = device.flops * layout.num_gpus
    return (matrices + head) / (speed * efficiency.matmul) + attention / (speed * efficiency.attention_forward)


def sync_seconds(shape: ModelShape, *, dtype: str, delta: bool) -> float:
    """Of one weight update, by published rates: what networks could do is far from what updates reach."""
    return BYTES[dtype] * shape.num_params / (DELTA_BYTES_PER_S if delta else SYNC_BYTES_PER_S)


def utilization(shape: ModelShape, step: StepTokens, device: Device, *, gpus: int, seconds: float) -> float:
    """Model FLOPs (forward and backward, no recomputation) over what the GPUs could do in that time."""
    matrices, attention, head = forward_flops(shape, step)
    return 3 * (matrices + attention + head) / (seconds * gpus * device.flops)


def _mlp_share(shape: ModelShape) -> float:
    return 1 - shape.num_layers * shape.attention_matrices / shape.layer_matrices


def _communication(
    shape: ModelShape,
    layout: ParallelLayout,
    work: Work,
    step: StepTokens,
    device: Device,
    efficiency: Efficiency,
    *,
    gpus_per_node: int,
) -> float:
    e = BYTES[work.dtype]
    tokens = step.tokens / (layout.data * layout.context)  # of one rank
    layers, sparse = shape.num_layers / layout.pipeline, shape.num_expert_layers / layout.pipeline
    near, far = device.link * efficiency.network, device.network * efficiency.network
    whole = near if layout.num_gpus <= gpus_per_node else far
    passes = 2 if layout.recompute in ("none", "selective") else 3
    row = tokens * shape.hidden * e  # bytes of the hidden states of those tokens
    visits = row * shape.experts_per_token
    seconds = 0.0
    if layout.tensor > 1:  # for experts, a row of every visit is gathered and scattered instead of one
        moved = passes * (4 * layers * row + 2 * sparse * (visits - row)) * (layout.tensor - 1) / layout.tensor
        seconds += moved / near
    if layout.context > 1:
        inside = layout.tensor * layout.context <= gpus_per_node
        moved = 4 * tokens * (layout.context - 1) * shape.kv_size / layout.tensor * e
        seconds += layers * moved / (near if inside else far)
    if layout.expert > 1:  # there and back; a share of them stays
        inside = layout.tensor * layout.expert <= gpus_per_node
        moved = 2 * passes * visits / layout.tensor * (layout.expert - 1) / layout.expert
        seconds += sparse * moved / (near if inside else far)
    if layout.pipeline > 1:  # and the gradients
        seconds += 2 * layout.virtual * row / layout.tensor / whole
    return seconds + _gradient_bytes(shape, layout, e) / whole


def _bubble(layout: ParallelLayout, rows: int) -> float:
    """Of the busy time. An interleaved schedule runs micro-batches in groups of as many as there are ranks: the last
    group is filled up with empty ones, taken to last as long as the others, which is at most what they cost."""
    filled = rows + -rows % layout.pipeline if layout.virtual > 1 else rows
    return (filled + (layout.pipeline - 1) / layout.virtual) / rows - 1


def _gradient_bytes(shape: ModelShape, layout: ParallelLayout, e: int) -> float:
    """Of gradients to the ranks that have their masters and of new parameters back; of experts, among the ranks that
    hold the same ones."""
    ranks = layout.data * layout.context
    copies = max(ranks // layout.expert, 1)
    shared, experts = rank_params(shape, layout, 0)
    each = (4 + e) if layout.backend == "megatron" else 4 + 2 * e
    return each * (shared * (ranks - 1) / ranks + experts * (copies - 1) / copies)


def _optimizer(shape: ModelShape, layout: ParallelLayout, device: Device, efficiency: Efficiency) -> float:
    shared, experts = rank_params(shape, layout, 0)
    ranks = layout.data * layout.context
    mine = shared / ranks + experts / max(ranks // layout.expert, 1)
    if layout.backend == "torch" and not layout.sharded:
        mine = float(shape.num_params)
    speed = device.host_link if layout.offload else device.bandwidth * efficiency.memory
    return OPTIMIZER_TRAFFIC * mine / speed
