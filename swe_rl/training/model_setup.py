"""What is done to a model before it is trained: precision, equal weights on all ranks, no dropout, checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from swe_rl.training import mesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cast(model: nn.Module, dtype: torch.dtype, *, only: Callable[[torch.dtype], bool] = lambda dtype: True) -> None:
    """Parameters of the dtypes that `only` names; buffers such as the rotary frequencies keep their precision."""
    for param in model.parameters():
        if only(param.dtype):
            param.data = param.data.to(dtype)


@torch.no_grad()
def broadcast(model: nn.Module) -> None:
    """The weights of rank 0 on every rank. Collective."""
    if mesh.world_size() > 1:
        for param in model.parameters():
            dist.broadcast(param, src=0)


def switch_dropout_off(model: nn.Module) -> None:
    """With dropout the trainer's policy would not be the one that sampled: the first ratio would not be 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if getattr(module, "attention_dropout", 0.0):
            module.attention_dropout = 0.0  # type: ignore[assignment]  # a plain number of transformers' attention


def set_checkpointing(model: PreTrainedModel, enabled: bool) -> None:
    """The model's own switch, so that blocks are recomputed in the backward pass."""
    if enabled:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
