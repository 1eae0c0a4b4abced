"""Tensors of one unit: from Hugging Face's whole tensors to the parts of tensor parallel ranks, and back, bit by bit.

Letters: H hidden, Q query heads, G key-value heads (query groups), D head dim, F rows of the MLP, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swe_rl.errors import CheckpointError
from swe_rl.training.megatron.convert_units import MegatronLayout, Unit
from swe_rl.training.planning.shapes import ModelShape

Shape = tuple[int, ...]


def hf_shapes(unit: Unit, shape: ModelShape) -> list[Shape]:
    """Shapes of unit.hf."""
    hidden, leaf = shape.hidden, unit.hf[0].split(".")[-2:]
    if unit.rule == "vocab":
        return [(shape.vocab, hidden)]
    if unit.rule == "qkv":
        tail = () if leaf[-1] == "bias" else (hidden,)
        return [(size, *tail) for size in (shape.q_size, shape.kv_size, shape.kv_size)]
    width = shape.intermediate if unit.expert < 0 else shape.expert_intermediate
    if unit.rule == "gate_up":
        return [(width, hidden)] * 2
    if unit.rule == "row":
        return [(hidden, shape.q_size if leaf[0] == "o_proj" else width)]
    if leaf[0] in ("q_norm", "k_norm"):
        return [(shape.head_dim,)]
    return [(shape.num_experts, hidden) if leaf[0] == "gate" else (hidden,)]


def part_shape(unit: Unit, shape: ModelShape, layout: MegatronLayout) -> Shape:
    """Shape of the part that each tensor parallel rank holds."""
    first, *others = hf_shapes(unit, shape)
    ranks = layout.tensor_parallel
    if unit.rule == "vocab":
        return (layout.padded_vocab(shape.vocab) // ranks, shape.hidden)
    if unit.rule in ("qkv", "gate_up"):
        return ((first[0] + sum(other[0] for other in others)) // ranks, *first[1:])
    if unit.rule == "row":
        return (first[0], first[1] // ranks)
    return first


def split(unit: Unit, tensors: Sequence[Tensor], shape: ModelShape, layout: MegatronLayout) -> list[Tensor]:
    """The parts [P] of the tensors unit.hf; views where possible."""
    ranks, first = layout.tensor_parallel, tensors[0]
    if unit.rule == "whole":
        return [first] * ranks
    if unit.rule == "row":
        return list(first.chunk(ranks, dim=1))
    if unit.rule == "gate_up":
        gates, ups = (tensor.chunk(ranks) for tensor in tensors)
        return [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
    if unit.rule == "qkv":
        return list(_interleave(tensors, shape).chunk(ranks))
    padding = layout.padded_vocab(shape.vocab) - shape.vocab  # zeros; the loss leaves these rows out
    return list(torch.cat([first, first.new_zeros(padding, first.shape[1])]).chunk(ranks))


def join(unit: Unit, parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    """The tensors unit.hf from the parts of all ranks. CheckpointError when ranks differ in what they share."""
    if unit.rule == "whole":
        for rank, part in enumerate(parts):
            if not torch.equal(part, parts[0]):
                raise CheckpointError(f"{unit.name} differs between the tensor parallel ranks 0 and {rank}")
        return [parts[0]]
    if unit.rule == "row":
        return [torch.cat(list(parts), dim=1)]
    if unit.rule == "gate_up":
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[which] for half in halves]) for which in (0, 1)]
    whole = torch.cat(list(parts))
    return _separate(whole, shape) if unit.rule == "qkv" else [whole[: shape.vocab]]


def _interleave(tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """q [Q D, ...], k and v [G D, ...] -> [(Q + 2 G) D, ...]: per group its Q / G queries, its key, its value."""
    groups = [tensor.unflatten(0, (shape.num_kv_heads, -1)) for tensor in tensors]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _separate(whole: Tensor, shape: ModelShape) -> list[Tensor]:
    groups = whole.unflatten(0, (shape.num_kv_heads, -1))
    sizes = [shape.q_size // shape.num_kv_heads, shape.head_dim, shape.head_dim]
    return [part.flatten(0, 1) for part in groups.split(sizes, dim=1)]
