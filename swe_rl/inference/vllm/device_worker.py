"""Weights from the trainer's GPU: vLLM's own NCCL and CUDA IPC transfers, with checksums; the workers' side.

What arrives is checked before it is loaded. The same transfers also load from the host's memory, which is where a
replica that was started anew finds the present version. The trainer's side, and what has not run on a GPU yet:
device_transfer.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from swe_rl.errors import InvariantError
from swe_rl.inference.vllm.device_transfer import ipc_arguments
from swe_rl.inference.vllm.weight_transfer import SharedUpdateInfo, load_shared
from swe_rl.ops.weight_delta import checksum


class CheckedModel:
    """Stands for the model while weights arrive: it loads those whose bits are right.

    `copied`: vLLM keeps what it is given until a layer is complete, by when the trainer may have gone on.
    """

    def __init__(self, model: Any, checksums: Mapping[str, int], *, copied: bool) -> None:
        self._model, self._checksums, self._copied = model, checksums, copied

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """As the model's. Raises InvariantError for other bits than the trainer's."""
        return self._model.load_weights(self._checked(weights))

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            own = tensor.clone() if self._copied else tensor
            if checksum(own) != self._checksums[name]:
                raise InvariantError(f"{name} did not arrive as it was sent")
            yield name, own


class FromDevice:
    """What NCCL and IPC have in common: checksums, and the host's memory as another source."""

    copied = False
    _checksums: Mapping[str, int] = {}
    model: Any
    device: torch.device

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        """Of WeightStore.location, or of device_transfer.described. ValueError for anything else."""
        if "path" in update_dict:
            return SharedUpdateInfo(**update_dict)
        own = dict(update_dict)
        self._checksums = {n: int(c) for n, c in zip(own["names"], own.pop("checksums"), strict=True)}
        return super().parse_update_info(self.prepared(own))  # type: ignore[misc]

    def prepared(self, update_dict: dict[str, Any]) -> dict[str, Any]:
        """As vLLM's own record has it."""
        return update_dict

    def receive_weights(self, update_info: Any) -> None:
        """Raises InvariantError for bits that are not those that were sent."""
        if isinstance(update_info, SharedUpdateInfo):
            load_shared(self.model, update_info, device=self.device)
            return
        model = self.model
        self.model = CheckedModel(model, self._checksums, copied=self.copied)
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self.model = model


class NcclWeightTransfer(FromDevice, NCCLWeightTransferEngine):
    """Whole tensors, one broadcast each."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Joins the trainer's group, and leaves the one before: another engine of the trainer was started anew."""
        self.shutdown()
        super().init_transfer_engine(init_info)


class IpcWeightTransfer(FromDevice, IPCWeightTransferEngine):
    """Tensors in the trainer's memory, on this GPU."""

    copied = True

    def prepared(self, update_dict: dict[str, Any]) -> dict[str, Any]:
        handles = update_dict.pop("handles")
        return {**update_dict, "ipc_handles": [{handle["gpu"]: ipc_arguments(handle)} for handle in handles]}
