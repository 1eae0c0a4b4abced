"""Where the tensors of Hugging Face's files lie among the parameters of transformers' model.

They are the same ones, mixtures of experts apart: files have the matrices of each expert, the model has one parameter
for all gates and ups of a layer [E, 2 F, H] and one for all downs [E, H, F] (E experts of F rows). A tensor of the
files is a range of the elements of a parameter, so nothing is computed between the two.

Units (convert_units) have the names of files; weights, gradients, checkpoints and updates of engines have those of the
model, as the torch backend's do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from swe_rl.errors import CheckpointError
from swe_rl.training.megatron.convert_split import Shape, hf_shapes
from swe_rl.training.megatron.convert_units import Unit, units
from swe_rl.training.planning.shapes import ModelShape


class Span(NamedTuple):
    """Elements of a parameter from `first` on, as many as the tensor of the files has."""

    name: str
    first: int


class Parameters:
    """Of one model. `groups`: all its units in order, those that fill a parameter together in one list."""

    def __init__(self, shape: ModelShape) -> None:
        self.shapes: dict[str, Shape] = {}  # by the name of the parameter
        self.spans: dict[str, Span] = {}  # by the name in the files
        self.sizes: dict[str, Shape] = {}  # of the tensors of the files
        self.groups: list[list[Unit]] = []
        for unit in units(shape):
            if unit.expert > 0:
                self.groups[-1].append(unit)
            elif unit.expert == 0 and self.groups[-1][0].expert == 0:  # the downs beside the gates and ups
                self.groups[-1].append(unit)
            else:
                self.groups.append([unit])
            self._add(unit, shape)

    def _add(self, unit: Unit, shape: ModelShape) -> None:
        sizes = dict(zip(unit.hf, hf_shapes(unit, shape), strict=True))
        self.sizes |= sizes
        if unit.expert < 0:
            self.shapes |= sizes
            self.spans |= {name: Span(name, 0) for name in sizes}
            return
        (first, *_), rows = sizes.values(), sum(size[0] for size in sizes.values())
        stem = unit.hf[0].partition(".experts.")[0] + ".experts."
        whole = stem + ("gate_up_proj" if unit.rule == "gate_up" else "down_proj")
        self.shapes[whole] = (shape.num_experts, rows, *first[1:])
        at = unit.expert * rows * math.prod(first[1:])
        for name, size in sizes.items():
            self.spans[name] = Span(whole, at)
            at += math.prod(size)

    def names(self, group: list[Unit]) -> list[str]:
        """The parameters that a group fills."""
        return list(dict.fromkeys(self.spans[name].name for unit in group for name in unit.hf))

    def take(self, weights: Mapping[str, Tensor], name: str) -> Tensor:
        """A tensor of the files out of parameters, a view. CheckpointError when it is missing or of another shape."""
        whole, first = self.spans[name]
        if whole not in weights:
            raise CheckpointError(f"the checkpoint lacks weights of this model, for example {whole}")
        found, size = weights[whole], self.sizes[name]
        if tuple(found.shape) != self.shapes[whole]:
            shapes = f"{tuple(found.shape)} in the checkpoint, {self.shapes[whole]} in this model"
            raise CheckpointError(f"{whole} has shape {shapes}")
        if size == self.shapes[whole]:
            return found
        return found.detach().reshape(-1)[first : first + math.prod(size)].view(size)

    def put(self, found: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        """Adds a tensor of the files to parameters."""
        whole, first = self.spans[name]
        if self.sizes[name] == self.shapes[whole]:
            found[whole] = tensor
            return
        if whole not in found:
            found[whole] = tensor.new_empty(self.shapes[whole])
        found[whole].view(-1)[first : first + tensor.numel()] = tensor.reshape(-1)
