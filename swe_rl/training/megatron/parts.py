"""The parameters of this process, and the Hugging Face tensors that they are parts of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swe_rl.errors import InvariantError
from swe_rl.training.megatron.convert_split import hf_shapes, join, part_shape, split
from swe_rl.training.megatron.convert_units import EMBEDDING, HEAD, Unit, places, units
from swe_rl.training.megatron.grid import Axis, Grid
from swe_rl.training.megatron.parameters import Parameters
from swe_rl.training.planning.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One parameter of this process: what of `unit` lies here."""

    key: str  # unique in the process: the name of GPTModel with global numbers of layers and experts
    unit: Unit
    param: nn.Parameter
    tied_copy: bool  # the head of the last stage, a second copy of the embedding of the first
    has_twin: bool  # either of those two

    @property
    def replicated(self) -> bool:
        """Whole on every tensor parallel rank."""
        return self.unit.rule == "whole"

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices."""
        return self.param.ndim >= 2

    def partial_gradient(self, *, sequence_parallel: bool) -> bool:
        """Whether tensor parallel ranks have to add their gradients: each has seen some tokens, or some heads."""
        return self.replicated and (sequence_parallel or self.unit.hf[0].endswith(("q_norm.weight", "k_norm.weight")))


def local_parts(chunks: Sequence[nn.Module], shape: ModelShape, grid: Grid) -> list[Part]:
    """All parameters of this process, in the order of the forward pass. InvariantError when one has no unit."""
    named = [dict(chunk.named_parameters()) for chunk in chunks]
    found = []
    for unit in units(shape):
        for rank, name in places(unit, shape, grid.layout):
            if rank._replace(virtual=0) == grid.place._replace(tensor=0):
                tied = unit.name != HEAD and name == HEAD
                key = HEAD if tied else unit.name.format(layer=unit.layer, expert=unit.expert)
                param = named[rank.virtual].pop(name, None)
                if param is None or tuple(param.shape) != part_shape(unit, shape, grid.layout):
                    raise InvariantError(f"megatron-core built no {name} of the expected shape for {unit.hf[0]}")
                twin = shape.tied and unit.name == EMBEDDING and grid.layout.num_stages > 1
                found.append(Part(key=key, unit=unit, param=param, tied_copy=tied, has_twin=twin))
    if spare := [name for rest in named for name in rest]:
        raise InvariantError(f"megatron-core built {min(spare)}, which no tensor of {shape.family} becomes")
    return found


class Exchange:
    """Values of parts (weights, gradients, moments) to Hugging Face tensors and back, one unit at a time."""

    def __init__(self, parts: Sequence[Part], shape: ModelShape, grid: Grid) -> None:
        self.shape, self.grid, self.parameters = shape, grid, Parameters(shape)
        self._own = {part.unit.hf: part for part in parts if not part.tied_copy}

    def whole(self, unit: Unit, value: Tensor | None, *, dtype: torch.dtype) -> list[Tensor]:
        """The tensors unit.hf of the whole model on every rank, from the part [part_shape] in `dtype` that lies here,
        None where it lies elsewhere. Collective over the replica."""
        grid, home = self.grid, places(unit, self.shape, self.grid.layout)[0].rank
        sizes = hf_shapes(unit, self.shape)
        tensors: list[Tensor] | None = None
        if value is not None:
            parts = [value]
            if grid.tensor.size > 1 and unit.rule != "whole":
                parts = [torch.empty_like(value) for _ in range(grid.tensor.size)]
                dist.all_gather(parts, value.contiguous(), group=grid.tensor.group)
            tensors = join(unit, parts, self.shape)
        if unit.expert >= 0 and grid.expert.size > 1 and home.pipeline == grid.pipeline.rank:
            tensors = self._spread(tensors, sizes, grid.expert, home.expert, dtype)
        if grid.pipeline.size > 1:
            tensors = self._spread(tensors, sizes, grid.pipeline, home.pipeline, dtype)
        assert tensors is not None  # it lies somewhere
        return tensors

    def _spread(
        self, tensors: list[Tensor] | None, sizes: Any, axis: Axis, home: int, dtype: torch.dtype
    ) -> list[Tensor]:
        """Those of the rank `home` of the axis on all of its ranks."""
        sent = tensors or [torch.empty(size, dtype=dtype, device=self.grid.device) for size in sizes]
        sent = [tensor.contiguous() for tensor in sent]
        for tensor in sent:
            dist.broadcast(tensor, src=dist.get_global_rank(axis.group, home), group=axis.group)
        return sent

    def part(self, unit: Unit) -> Part | None:
        """The parameter that a unit has here; None where another stage or expert rank has it."""
        return self._own.get(unit.hf)

    def own(self, unit: Unit, tensors: Sequence[Tensor]) -> Tensor:
        """The part of this tensor parallel rank of whole tensors unit.hf."""
        return split(unit, tensors, self.shape, self.grid.layout)[self.grid.tensor.rank]

    def own_of(self, unit: Unit, weights: Mapping[str, Tensor]) -> Tensor:
        """As `own`, out of parameters of transformers' model. CheckpointError when one is missing or of another
        shape."""
        return self.own(unit, [self.parameters.take(weights, name) for name in unit.hf])
