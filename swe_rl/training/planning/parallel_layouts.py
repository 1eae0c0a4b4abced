"""How a model can be cut over the GPUs of the trainer: what Megatron can build, and why not the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swe_rl.config.trainer import MIN_INTERLEAVED
from swe_rl.training.planning.shapes import ModelShape

RECOMPUTE = ("none", "selective", "full", "offload")
# none: all activations are kept.  selective: norms and MLPs are computed again (recompute_modules layernorm, mlp).
# full: only the input of each layer is kept.  offload: as full, and the inputs of layers wait in host memory.
CONFIGURABLE = ("none", "full")  # what trainer.activation_checkpointing can choose, so what is searched


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of the axes; their product is the GPUs of the trainer. `backend` torch has context and data alone."""

    backend: str  # torch | megatron
    data: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual: int = 1  # parts of the model on each pipeline rank, by turns: the interleaved schedule
    expert: int = 1  # experts are spread over so many of the data and context parallel ranks
    recompute: str = "none"
    offload: bool = False  # optimizer state and masters in host memory
    sharded: bool = False  # torch: FSDP

    @property
    def num_gpus(self) -> int:
        return self.data * self.tensor * self.context * self.pipeline

    def describe(self) -> str:
        if self.backend == "torch":
            how = "FSDP" if self.sharded else "replicated"
            axes = f"DP{self.data} x CP{self.context}" if self.context > 1 else f"DP{self.data}"
            cuts = f"{how} over {axes}" if self.num_gpus > 1 else "one process"
        else:
            cuts = f"TP{self.tensor} CP{self.context} PP{self.pipeline} DP{self.data}"
            cuts += f" VP{self.virtual}" if self.virtual > 1 else ""
            cuts += f" EP{self.expert}" if self.expert > 1 else ""
        return f"{cuts}, recompute {self.recompute}{', optimizer offloaded' if self.offload else ''}"

    def overrides(self) -> list[str]:
        """The words of a command line that choose this layout."""
        chosen: dict[str, object]
        if self.backend == "torch":
            chosen = {"fsdp": self.sharded, "context_parallel": self.context}
        else:
            chosen = {
                "tensor_parallel": self.tensor,
                "context_parallel": self.context,
                "pipeline_parallel": self.pipeline,
                "virtual_pipeline": self.virtual,
                "expert_parallel": self.expert,
                "offload": self.offload,
            }
        words = {**chosen, "activation_checkpointing": self.recompute != "none"}
        return [f"trainer.{key}={str(value).lower()}" for key, value in words.items()]


def problem(layout: ParallelLayout, shape: ModelShape, *, gpus_per_node: int, rows_per_step: int) -> str:
    """Why Megatron cannot run `layout`, or would starve in it; "" when it can.

    rows_per_step: micro-batches of an optimizer step over all ranks.
    """
    tensor = layout.tensor
    if tensor > gpus_per_node:
        return f"TP{tensor} would leave the node of {gpus_per_node} GPUs"
    if layout.context & (layout.context - 1):
        return f"CP{layout.context} is no power of two: rows could not be cut evenly among heads and tiles"
    for what, number in (("query heads", shape.num_heads), ("key-value heads", shape.num_kv_heads)):
        if number % tensor:
            return f"TP{tensor} does not divide the {number} {what}"
    if shape.intermediate % tensor or shape.expert_intermediate % tensor:
        return f"TP{tensor} does not divide the rows of the MLP"
    if layout.virtual > 1 and layout.pipeline < MIN_INTERLEAVED:
        return f"VP{layout.virtual} needs a pipeline of at least PP{MIN_INTERLEAVED}, it has PP{layout.pipeline}"
    if shape.num_layers % (layout.pipeline * layout.virtual):
        stages = f"PP{layout.pipeline}" + (f" x VP{layout.virtual}" if layout.virtual > 1 else "")
        return f"{stages} does not divide the {shape.num_layers} layers"
    together = tensor * layout.context
    if together % gpus_per_node and gpus_per_node % together:
        return f"TP{tensor} x CP{layout.context} neither fill nodes of {gpus_per_node} GPUs nor divide one"
    if max(shape.num_experts, 1) % layout.expert:
        return f"EP{layout.expert} does not divide the {shape.num_experts} experts"
    if (layout.data * layout.context) % layout.expert:
        return f"EP{layout.expert} does not divide DP{layout.data} x CP{layout.context}"
    if layout.data * layout.pipeline > rows_per_step:
        return (
            f"an optimizer step has {rows_per_step} micro-batches, DP{layout.data} x PP{layout.pipeline} need "
            f"{layout.data * layout.pipeline}"
        )
    return ""


def megatron_layouts(shape: ModelShape, *, num_gpus: int) -> Iterator[ParallelLayout]:
    """Every way to write num_gpus as tensor x context x pipeline x data, with every division of a stage that the
    interleaved schedule takes; not all of them are legal."""
    for tensor in _divisors(num_gpus):
        for context in _divisors(num_gpus // tensor):
            for pipeline in _divisors(num_gpus // tensor // context):
                data = num_gpus // (tensor * context * pipeline)
                experts = _divisors(data * context) if shape.num_experts else [1]
                yield from (
                    ParallelLayout(
                        backend="megatron",
                        data=data,
                        tensor=tensor,
                        context=context,
                        pipeline=pipeline,
                        virtual=virtual,
                        expert=expert,
                        recompute=mode,
                        offload=away,
                    )
                    for virtual in _virtual(shape, pipeline)
                    for expert in experts
                    for mode in CONFIGURABLE
                    for away in (False, True)
                )


def torch_layouts(*, num_gpus: int) -> Iterator[ParallelLayout]:
    """Replicated and sharded, with and without recomputation."""
    for sharded in (False, True) if num_gpus > 1 else (False,):
        for mode in CONFIGURABLE:
            yield ParallelLayout(backend="torch", data=num_gpus, recompute=mode, sharded=sharded)


def _virtual(shape: ModelShape, pipeline: int) -> list[int]:
    if pipeline < MIN_INTERLEAVED or shape.num_layers % pipeline:
        return [1]
    return _divisors(shape.num_layers // pipeline)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
