"""Master weights, gradients and AdamW of a Megatron model, spread over the ranks that hold the same weights (ZeRO-1).

Ours, in place of megatron-core's DistributedOptimizer: the state of that one has names and cuts of its own, and it has
no fp64. This one keeps its state by parameter, whence checkpoints fit every layout and the torch backend. Where theirs
is told that tensors are CUDA's, as it insists, it takes the same step on a CPU (test_megatron_optimizer). Ours overlaps
nothing: gradients are summed when the last micro-batch is done. Nothing is claimed for its speed.

Letters: N elements of a parameter, D ranks with the same weights, n = ceil(N / D) of them on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swe_rl.config import TrainerConfig
from swe_rl.training import mesh
from swe_rl.training.megatron.grid import Axis, Grid
from swe_rl.training.megatron.parts import Exchange, Part
from swe_rl.training.module_norms import module_group

MOMENTS = ("exp_avg", "exp_avg_sq")
EVERY, NONE = slice(None), slice(0)  # of the groups of units of a model


class ShardedMasters:
    """fp32 (fp64 for fp64) masters of the parts of this process; each rank of `data` has its n elements of each.

    `offload` keeps masters and the optimiser's state in host memory. Gradients of micro-batches are added in fp32.
    """

    def __init__(self, parts: Sequence[Part], exchange: Exchange, grid: Grid, *, offload: bool = False) -> None:
        self.parts, self.exchange, self.grid = list(parts), exchange, grid
        self.wide = torch.float64 if self.parts[0].param.dtype == torch.float64 else torch.float32
        self.home = torch.device("cpu") if offload else grid.device
        self.masters: dict[str, nn.Parameter] = {}
        self.sums: dict[str, Tensor] = {}  # of gradients, whole parameters
        self._hooks = []
        for part in self.parts:
            shard = torch.zeros(self._shard_size(part), dtype=self.wide, device=self.home)
            self.masters[part.key] = nn.Parameter(shard)
            self.sums[part.key] = torch.zeros_like(part.param, dtype=self.wide)
            self._hooks.append(part.param.register_post_accumulate_grad_hook(_add_to(self.sums[part.key])))

    def axis(self, part: Part) -> Axis:
        """The ranks that have the same parameter."""
        return self.grid.data if part.unit.expert < 0 else self.grid.expert_data

    def _shard_size(self, part: Part) -> int:
        return -(-part.param.numel() // self.axis(part).size)

    def shard_of(self, part: Part, value: Tensor) -> Tensor:
        """Elements [n] of `value` [as the parameter] that this rank has; zeros behind the last one."""
        size, axis = self._shard_size(part), self.axis(part)
        padded = torch.nn.functional.pad(value.reshape(-1), (0, size * axis.size - value.numel()))
        return padded[axis.rank * size : (axis.rank + 1) * size]

    def whole_of(self, part: Part, shard: Tensor) -> Tensor:
        """The inverse, on the device of the grid. Collective over the ranks with this parameter."""
        axis, shard = self.axis(part), shard.detach().to(self.grid.device)
        flat = shard
        if axis.size > 1:
            flat = shard.new_empty(axis.size * len(shard))
            dist.all_gather_single(flat, shard.contiguous(), group=axis.group)
        return flat[: part.param.numel()].view(part.param.shape)

    @torch.no_grad()
    def full(
        self, value_of: Callable[[Part], Tensor], *, keep: slice = EVERY, on_host: bool = False, own: bool = False
    ) -> dict[str, Tensor]:
        """Full tensors by the names of transformers' model from this rank's shards, which value_of gives; gathered unit
        by unit, of whose groups this rank keeps some and in the others only takes part. With `own`, which is for
        on_host, none is a view of a shard. Collective."""
        found: dict[str, Tensor] = {}
        parameters = self.exchange.parameters
        kept = range(len(parameters.groups))[keep]
        for number, group in enumerate(parameters.groups):
            for unit in group:
                part = self.exchange.part(unit)
                value = None if part is None else self.whole_of(part, value_of(part))
                tensors = self.exchange.whole(unit, value, dtype=self.wide)
                if number in kept:
                    for name, tensor in zip(unit.hf, tensors, strict=True):
                        parameters.put(found, name, tensor.to("cpu", copy=own) if on_host else tensor)
        return found

    def of(self, part: Part) -> Tensor:
        """The shard [n] of this rank."""
        return self.masters[part.key]

    def full_on_host(self, *, keep: bool, own: bool = False) -> dict[str, Tensor]:
        """As MasterWeights.full_on_host. Collective."""
        return self.full(self.of, keep=EVERY if keep else NONE, on_host=True, own=own)

    @torch.no_grad()
    def load(self, part: Part, value: Tensor) -> None:
        """Sets one parameter from `value` [its shape], master and working weight."""
        master = self.masters[part.key]
        master.copy_(self.shard_of(part, value.to(master.dtype)))
        part.param.copy_(value)

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters into the working weights. Collective over the ranks with the same weights."""
        for part in self.parts:
            part.param.copy_(self.whole_of(part, self.masters[part.key].detach().to(part.param.dtype)))

    def zero_grad(self) -> None:
        for total in self.sums.values():
            total.zero_()
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums of the micro-batches -> gradients of the masters: over tensor parallel ranks where these saw parts, over
        the two copies of a tied embedding, over the ranks with the same weights. Collective."""
        for part in self.parts:
            total, axis = self.sums[part.key], self.axis(part)
            if part.partial_gradient(sequence_parallel=self.grid.sequence_parallel) and self.grid.tensor.size > 1:
                dist.all_reduce(total, group=self.grid.tensor.group)
            if part.has_twin:
                dist.all_reduce(total, group=self.grid.ends)
            size = self._shard_size(part)
            mine = total.reshape(-1)
            if axis.size > 1:
                padded = torch.nn.functional.pad(mine, (0, size * axis.size - mine.numel()))
                mine = padded.new_empty(size)
                dist.reduce_scatter_single(mine, padded, group=axis.group)
            self.masters[part.key].grad = mine.to(self.home)

    def squared_norms(self) -> dict[str, float]:
        """Of the whole gradient by group of modules, every parameter counted once. Collective over all ranks."""
        sums: dict[str, Tensor] = {}
        for part in self.parts:
            grad = self.masters[part.key].grad
            if grad is None or part.tied_copy or (part.replicated and self.grid.tensor.rank):
                continue
            group = module_group(part.unit.hf[0])
            square = grad.square().sum(dtype=torch.float64)
            sums[group] = sums[group] + square if group in sums else square
        names = sorted({name for found in mesh.gather_objects([sorted(sums)]) for name in found})
        return dict(zip(names, mesh.all_reduce_sum([float(sums.get(name, 0.0)) for name in names]), strict=True))

    def scale_gradients(self, factor: float) -> None:
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.mul_(factor)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of this rank's shards, for `restore`."""
        return {key: master.detach().clone() for key, master in self.masters.items()}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Collective, as `publish`."""
        for key, master in self.masters.items():
            master.copy_(snapshot[key])
        self.publish()


def _add_to(total: Tensor) -> Any:
    def hook(param: Tensor) -> None:
        assert param.grad is not None  # called only after accumulation
        total.add_(param.grad)
        param.grad = None

    return hook


class ShardedAdamW:
    """torch's AdamW over the shards of masters; matrices decay, vectors do not."""

    def __init__(self, masters: ShardedMasters, cfg: TrainerConfig) -> None:
        self._masters = masters
        decaying = [masters.masters[part.key] for part in masters.parts if part.decays]
        others = [masters.masters[part.key] for part in masters.parts if not part.decays]
        groups = [{"params": decaying, "weight_decay": cfg.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=cfg.learning_rate,
            betas=(cfg.betas[0], cfg.betas[1]),
            eps=cfg.eps,
            fused=True,
        )

    def step(self, *, learning_rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()

    def state_of(self, part: Part) -> dict[str, Tensor]:
        """step, and the moments [n] of this rank's shard; empty before the first step."""
        found: dict[str, Tensor] = self._adamw.state.get(self._masters.masters[part.key], {})
        return found

    def set_state(self, part: Part, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_of`; moments in the dtype and on the device of the master."""
        master = self._masters.masters[part.key]
        self._adamw.state.pop(master, None)
        if state:
            kept = {name: state[name].to(device=master.device, dtype=master.dtype).clone() for name in MOMENTS}
            self._adamw.state[master] = {"step": state["step"].clone().float().to(master.device), **kept}
