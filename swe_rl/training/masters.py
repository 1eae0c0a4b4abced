"""fp32 master weights for a model that computes in a lower precision, and full (unsharded) copies of either."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from swe_rl.errors import CheckpointError

FULL_PRECISION = (torch.float32, torch.float64)


class MasterWeights:
    """What the optimiser moves, by Hugging Face name (a tied parameter appears once); frozen parameters are left alone.

    Parameters in fp32 or fp64 are their own masters. For others an fp32 copy is kept; each micro-batch's gradient is
    added to the master's as soon as it is complete, so that accumulation over micro-batches is fp32.
    """

    def __init__(self, model: nn.Module) -> None:
        self._working = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.params: dict[str, nn.Parameter] = {}
        self._hooks: list[RemovableHandle] = []
        for name, param in self._working.items():
            if param.dtype in FULL_PRECISION:
                self.params[name] = param
            else:
                master = nn.Parameter(param.detach().float())
                self.params[name] = master
                self._hooks.append(param.register_post_accumulate_grad_hook(_accumulate_into(master)))

    def detach(self) -> None:
        """Stops collecting gradients: other masters take over the same model."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters into the working weights; nothing to do where they are the same tensor."""
        for name, master in self.params.items():
            if master is not self._working[name]:
                self._working[name].copy_(master)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the masters as they lie here (shards stay shards), for `restore`."""
        return {name: param.detach().clone() for name, param in self.params.items()}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Copies a snapshot of these masters back, bit by bit, and publishes it."""
        for name, param in self.params.items():
            param.copy_(snapshot[name])
        self.publish()

    def full(self) -> dict[str, Tensor]:
        """Detached full tensors by name. Collective when sharded; otherwise views that the next step changes."""
        return {name: full_tensor(param) for name, param in self.params.items()}

    def full_on_host(self, *, keep: bool, own: bool = False) -> dict[str, Tensor]:
        """As `full`, but gathered one by one into host memory, so that a model too large for one device can be saved.

        Without `keep` this rank only takes part and returns nothing; with `own` nothing is a view of what is trained.
        """
        return gathered(self.params, keep=keep, own=own)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies full tensors in. Raises CheckpointError when names or shapes do not fit."""
        missing = sorted(set(self.params) - set(weights))
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} weights of this model, for example {missing[0]}"
            )
        for name, param in self.params.items():
            if weights[name].shape != param.shape:
                shapes = f"{tuple(weights[name].shape)} in the checkpoint, {tuple(param.shape)} in this model"
                raise CheckpointError(f"{name} has shape {shapes}")
            param.copy_(like(param, weights[name]))
        self.publish()


def _accumulate_into(master: nn.Parameter):  # type: ignore[no-untyped-def]  # torch names no type for this hook
    def hook(param: Tensor) -> None:
        assert param.grad is not None  # called only after accumulation
        if master.grad is None:
            master.grad = param.grad.float()
        else:
            master.grad.add_(param.grad)
        param.grad = None

    return hook


def full_tensor(value: Tensor) -> Tensor:
    """The whole of a possibly sharded tensor, detached. Collective when sharded."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def gathered(values: Mapping[str, Tensor], *, keep: bool, own: bool = False) -> dict[str, Tensor]:
    """Full tensors by name, sharded ones on the host, one at a time; {} without `keep`. Collective when sharded.
    With `own` all are on the host, and copies."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        whole = full_tensor(value)
        if keep and own:
            found[name] = whole.to("cpu", copy=True)
        elif keep:
            found[name] = whole.cpu() if isinstance(value, DTensor) else whole
    return found


def like(param: Tensor, value: Tensor) -> Tensor:
    """`value` with the device, dtype and sharding of `param`."""
    value = value.to(device=param.device, dtype=param.dtype)
    if isinstance(param, DTensor):
        return distribute_tensor(value, param.device_mesh, param.placements)
    return value


def sum_gradients(params: Mapping[str, nn.Parameter]) -> None:
    """Sums replicated gradients over ranks, in one fixed order; a missing gradient counts as zero. Collective."""
    pending = []
    for param in params.values():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        pending.append(dist.all_reduce(param.grad, async_op=True))
    for work in pending:
        work.wait()
