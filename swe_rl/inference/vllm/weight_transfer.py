"""The CPU weight transfer: every worker reads the published weights from shared memory, in vLLM's own three calls.

    location = store.location(checksums, version=3)                             # the trainer's side, see store.py
    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(update_info=location))
    await llm.finish_weight_update("3")

The worker checks every tensor's checksum before it loads it. vLLM finds the transfer because its worker imports this
module (settings.WORKER_EXTENSION).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from swe_rl.inference.vllm.owner import remove_with_owner, watch_owner
from swe_rl.inference.vllm.settings import WEIGHT_TRANSFER
from swe_rl.inference.vllm.store import read_tensors


@dataclass
class SharedInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: every update says where it lies."""


@dataclass
class SharedUpdateInfo(WeightTransferUpdateInfo):
    """What WeightStore.location returns."""

    path: str
    version: int
    tensors: list[list[Any]] = field(default_factory=list)


class SharedWeightTransfer(WeightTransferEngine[SharedInitInfo, SharedUpdateInfo]):
    """Runs inside vLLM's worker. Loading is vLLM's: it shards, fuses and repacks as when the model was first loaded."""

    init_info_cls = SharedInitInfo
    update_info_cls = SharedUpdateInfo

    def init_transfer_engine(self, init_info: SharedInitInfo) -> None:
        """No connection is needed."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_heads(self.model)

    def receive_weights(self, update_info: SharedUpdateInfo) -> None:
        """Raises InvariantError for bits that are not those that were published."""
        remove_with_owner(Path(update_info.path).parent)
        tensors: Any = read_tensors(update_info.path, update_info.tensors, version=update_info.version)
        model: Any = self.model
        model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, without waiting for an accelerator where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Nothing is held."""


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Renews the packed copy that vLLM's CPU kernels multiply with.

    A reload renews it for layers that got weights of their own. A head that is tied to the embedding gets none, and
    would go on sampling from the head it was started with: logprobs off by tenths of a nat, and no error (0.32.0).
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def register() -> None:
    """Makes the transfer known to vLLM in this process. Idempotent."""
    if WEIGHT_TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER, SharedWeightTransfer)


class WorkerExtension:
    """Mixed into vLLM's worker class. vLLM imports it for that in the worker's process, which is where the transfer
    has to be known, and where the owner of the engine is watched."""


register()
watch_owner()
