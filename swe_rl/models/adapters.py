"""Low-rank adapters (LoRA, arXiv:2106.09685) on the linear layers of a model's decoder blocks.

    adapt(model, rank=64, alpha=128.0)      # y = x W^T + scale (x A^T) B^T,  scale = alpha / rank

Every adapted layer keeps its weight under its own name, frozen, and gets A [rank, in] and B [out, rank] beside it. B
begins at zero: the model is unchanged. There is no dropout: trainer and engine must compute the same.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swe_rl.errors import ConfigError

SUFFIXES = ("lora_a", "lora_b")


class AdaptedLinear(nn.Linear):
    """A linear layer that `adapt` has turned into this."""

    lora_a: nn.Parameter  # [rank, in]
    lora_b: nn.Parameter  # [out, rank]
    scale: float

    def forward(self, input: Tensor) -> Tensor:
        low = F.linear(F.linear(input, self.lora_a), self.lora_b)
        return torch.add(F.linear(input, self.weight, self.bias), low, alpha=self.scale)


def adapt(model: nn.Module, *, rank: int, alpha: float) -> None:
    """Freezes `model` and gives every linear layer of its decoder blocks an adapter, in place; the head has none.

    A's values depend on the layer's name only, uniform in +-1/sqrt(in). Raises ConfigError when there is nothing to
    adapt, or something is adapted already.
    """
    if rank < 1 or alpha <= 0:
        raise ConfigError(f"lora_rank={rank} and lora_alpha={alpha:g}: both must be positive")
    layers = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and ".layers." in f".{name}"]
    if not layers or is_adapted(model):
        raise ConfigError("model.lora_rank: this model has no plain linear layer in its decoder blocks to adapt")
    model.requires_grad_(False)
    for name, layer in layers:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        bound = 1.0 / math.sqrt(layer.in_features)
        first = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        layer.__class__ = AdaptedLinear
        adapted = cast(AdaptedLinear, layer)
        adapted.lora_a = nn.Parameter(first.to(layer.weight))
        adapted.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank).to(layer.weight))
        adapted.scale = alpha / rank


def is_adapted(model: nn.Module) -> bool:
    return next(adapted_layers(model), None) is not None


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """(name, layer)."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLinear))


def trained_names(model: nn.Module) -> list[str]:
    """Of the parameters that training moves: of the adapters if there are any, all otherwise; a tied one once."""
    names = [name for name, _ in model.named_parameters()]
    adapters = [name for name in names if name.endswith(SUFFIXES)]
    return adapters or names
