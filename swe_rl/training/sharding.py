"""FSDP2 around PolicyModel: each decoder block is a unit, the root holds embeddings, final norm and head."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from swe_rl.errors import ConfigError


def shard(policy: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
    """Shards `policy` over all ranks, in place. Parameters stay fp32 (fp64), the forward pass runs in `dtype`.

    Gradients are reduced in the parameters' dtype and SUMMED, not averaged: token weights already hold global
    denominators. Ranks that compute parts of one row (trainer.context_parallel) therefore need no axis of their own:
    their gradients are terms of the same sum, and one reduce-scatter over all ranks leaves the smallest shards.
    Raises ConfigError outside a torchrun job.
    """
    if not dist.is_initialized():
        raise ConfigError("trainer.fsdp=true needs a torchrun job: start with torchrun, or set trainer.fsdp=false")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    full = next(policy.parameters()).dtype
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == full else dtype, reduce_dtype=full)
    for block in decoder_blocks(policy):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows neither AVG nor PREMUL_SUM


def decoder_blocks(policy: nn.Module) -> list[nn.Module]:
    """The modules of every ModuleList called `layers` (Qwen3, Llama and their relatives)."""
    lists = [m for name, m in policy.named_modules() if name.endswith(".layers") and isinstance(m, nn.ModuleList)]
    return [block for blocks in lists for block in blocks]


def free_gathered(policy: nn.Module) -> None:
    """Drops parameters that a forward pass without backward left gathered: they would miss the next update."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
