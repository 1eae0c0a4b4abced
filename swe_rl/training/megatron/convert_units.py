"""Which Hugging Face tensors become which tensors of megatron-core's GPTModel, and on which ranks these live.

A unit is the smallest set of tensors that become one another. Its name is that of GPTModel.state_dict; layers and
experts have global numbers here and local ones in the files of ranks. `modules` says how the model was built: "local"
(megatron-core's own modules, experts one by one) or "te" (Transformer Engine: norms inside the linear layers behind
them, grouped experts).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from swe_rl.errors import ConfigError
from swe_rl.training.planning.shapes import ModelShape

MODULES = ("local", "te")
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class Rank(NamedTuple):
    """A process of the grid, and one of its model chunks. Data and context parallel ranks hold the same weights."""

    tensor: int = 0
    pipeline: int = 0
    virtual: int = 0
    expert: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """How a model is cut. Experts are cut over tensor_parallel too (expert_tensor_parallel_size = tensor_parallel)."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1  # model chunks of each pipeline rank (interleaved schedule)
    expert_parallel: int = 1
    vocab_multiple: int = 128  # the vocabulary is padded to a multiple of it times tensor_parallel, as Megatron does
    modules: str = "local"

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel * self.virtual_pipeline

    def padded_vocab(self, vocab: int) -> int:
        multiple = self.vocab_multiple * self.tensor_parallel
        return -(-vocab // multiple) * multiple

    def ranks(self) -> list[Rank]:
        sizes = (self.tensor_parallel, self.pipeline_parallel, self.virtual_pipeline, self.expert_parallel)
        return [Rank(*place) for place in product(*map(range, sizes))]

    def check(self, shape: ModelShape) -> None:
        """ConfigError, naming the option, when Megatron could not build `shape` in this layout."""
        for name in ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel", "vocab_multiple"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.modules not in MODULES:
            raise ConfigError(f"modules={self.modules!r} is unknown: use one of {', '.join(MODULES)}")
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ConfigError(f"virtual_pipeline={self.virtual_pipeline} needs a pipeline of at least 2")
        widths = {"query heads": shape.num_heads, "key-value heads": shape.num_kv_heads}
        if shape.num_expert_layers < shape.num_layers:
            widths["rows of the MLP"] = shape.intermediate
        if shape.num_experts:
            widths["rows of an expert"] = shape.expert_intermediate
        for what, number in widths.items():
            if number % self.tensor_parallel:
                raise ConfigError(f"tensor_parallel={self.tensor_parallel} does not divide the {number} {what}")
        if shape.num_layers % self.num_stages:
            stages = f"pipeline_parallel={self.pipeline_parallel}"
            if self.virtual_pipeline > 1:
                stages += f" x virtual_pipeline={self.virtual_pipeline}"
            raise ConfigError(f"{stages} does not divide the {shape.num_layers} layers")
        if self.expert_parallel > 1 and not shape.num_experts:
            raise ConfigError(f"expert_parallel={self.expert_parallel}, but the model has no experts: set it to 1")
        if shape.num_experts % self.expert_parallel:
            raise ConfigError(f"expert_parallel={self.expert_parallel} does not divide the {shape.num_experts} experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """`rule` is a function of convert_split: whole, row, qkv, gate_up or vocab."""

    rule: str
    hf: tuple[str, ...]
    name: str  # with {layer} and {expert}
    layer: int = -1  # -1: of no layer
    expert: int = -1


class Place(NamedTuple):
    rank: Rank  # `tensor` is 0: the parts of all tensor parallel ranks follow it
    name: str


def units(shape: ModelShape, *, modules: str = "local") -> Iterator[Unit]:
    """All units of a model, in the order of the forward pass."""
    yield Unit(rule="vocab", hf=("model.embed_tokens.weight",), name=EMBEDDING)
    for layer in range(shape.num_layers):
        yield from _attention(shape, layer, modules)
        yield from _experts(layer, shape, modules) if shape.has_experts(layer) else _mlp(layer, modules)
    yield Unit(rule="whole", hf=("model.norm.weight",), name="decoder.final_layernorm.weight")
    if not shape.tied:
        yield Unit(rule="vocab", hf=("lm_head.weight",), name=HEAD)


def places(unit: Unit, shape: ModelShape, layout: MegatronLayout) -> list[Place]:
    """Every (pipeline, virtual, expert) rank that holds a unit, and the name that it has there.

    A tied head is a second copy of the embedding when first and last stage are different ones.
    """
    per_stage = shape.num_layers // layout.num_stages
    last = layout.num_stages - 1
    if unit.layer >= 0:
        stages = {unit.layer // per_stage: unit.name}
    elif unit.name == EMBEDDING:
        stages = {0: EMBEDDING, **({last: HEAD} if shape.tied and last else {})}
    else:
        stages = {last: unit.name}
    per_rank = max(shape.num_experts, 1) // layout.expert_parallel
    holders = range(layout.expert_parallel) if unit.expert < 0 else [unit.expert // per_rank]
    return [
        Place(
            Rank(0, stage % layout.pipeline_parallel, stage // layout.pipeline_parallel, expert),
            name.format(layer=unit.layer % per_stage, expert=unit.expert % per_rank),
        )
        for stage, name in stages.items()
        for expert in holders
    ]


def _attention(shape: ModelShape, layer: int, modules: str) -> Iterator[Unit]:
    ours, theirs = "decoder.layers.{layer}.", f"model.layers.{layer}."
    norm = "self_attention.linear_qkv.layer_norm_weight" if modules == "te" else "input_layernorm.weight"
    yield Unit(rule="whole", hf=(f"{theirs}input_layernorm.weight",), name=ours + norm, layer=layer)
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        names = tuple(f"{theirs}self_attn.{which}_proj.{kind}" for which in "qkv")
        yield Unit(rule="qkv", hf=names, name=f"{ours}self_attention.linear_qkv.{kind}", layer=layer)
    for which in "qk" if shape.qk_norm else "":
        names = (f"{theirs}self_attn.{which}_norm.weight",)
        yield Unit(rule="whole", hf=names, name=f"{ours}self_attention.{which}_layernorm.weight", layer=layer)
    names = (f"{theirs}self_attn.o_proj.weight",)
    yield Unit(rule="row", hf=names, name=f"{ours}self_attention.linear_proj.weight", layer=layer)


def _mlp(layer: int, modules: str) -> Iterator[Unit]:
    ours, theirs = "decoder.layers.{layer}.", f"model.layers.{layer}."
    norm = "mlp.linear_fc1.layer_norm_weight" if modules == "te" else "pre_mlp_layernorm.weight"
    yield Unit(rule="whole", hf=(f"{theirs}post_attention_layernorm.weight",), name=ours + norm, layer=layer)
    both = (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight")
    yield Unit(rule="gate_up", hf=both, name=f"{ours}mlp.linear_fc1.weight", layer=layer)
    yield Unit(rule="row", hf=(f"{theirs}mlp.down_proj.weight",), name=f"{ours}mlp.linear_fc2.weight", layer=layer)


def _experts(layer: int, shape: ModelShape, modules: str) -> Iterator[Unit]:
    ours, theirs = "decoder.layers.{layer}.", f"model.layers.{layer}."
    norm = (f"{theirs}post_attention_layernorm.weight",)
    yield Unit(rule="whole", hf=norm, name=f"{ours}pre_mlp_layernorm.weight", layer=layer)
    yield Unit(rule="whole", hf=(f"{theirs}mlp.gate.weight",), name=f"{ours}mlp.router.weight", layer=layer)
    for expert in range(shape.num_experts):
        one = f"{theirs}mlp.experts.{expert}."
        first, second = (
            f"{ours}mlp.experts.linear_fc{number}.weight{{expert}}"
            if modules == "te"
            else f"{ours}mlp.experts.local_experts.{{expert}}.linear_fc{number}.weight"
            for number in (1, 2)
        )
        both = (f"{one}gate_proj.weight", f"{one}up_proj.weight")
        yield Unit(rule="gate_up", hf=both, name=first, layer=layer, expert=expert)
        yield Unit(rule="row", hf=(f"{one}down_proj.weight",), name=second, layer=layer, expert=expert)
