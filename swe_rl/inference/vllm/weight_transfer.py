"""The CPU weight transfer: every worker reads the published weights from shared memory, in vLLM's own three calls.

    location = store.location(checksums, version=3)                             # the trainer's side, see store.py
    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(update_info=location))
    await llm.finish_weight_update("3")

The worker checks every tensor's checksum before it loads it. vLLM finds the transfer because its worker imports this
module (settings.WORKER_EXTENSION), and with it those from GPU to GPU (device_worker.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from swe_rl.inference.vllm.cpu_experts import let_the_cpu_runner_return_experts, pass_the_check
from swe_rl.inference.vllm.owner import remove_with_owner, watch_owner
from swe_rl.inference.vllm.settings import WEIGHT_TRANSFERS
from swe_rl.inference.vllm.store import read_tensors

DEVICE_WORKER = "swe_rl.inference.vllm.device_worker"


@dataclass
class SharedInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: every update says where it lies."""


@dataclass
class SharedUpdateInfo(WeightTransferUpdateInfo):
    """What WeightStore.location returns."""

    path: str
    version: int
    tensors: list[list[Any]] = field(default_factory=list)


def load_shared(model: Any, update_info: SharedUpdateInfo, *, device: torch.device) -> None:
    """Loads the published weights. Raises InvariantError for bits that are not those that were published."""
    remove_with_owner(Path(update_info.path).parent)
    tensors: Any = read_tensors(update_info.path, update_info.tensors, version=update_info.version)
    model.load_weights((name, tensor.to(device)) for name, tensor in tensors)


class SharedWeightTransfer(WeightTransferEngine[SharedInitInfo, SharedUpdateInfo]):
    """Runs inside vLLM's worker. Loading is vLLM's: it shards, fuses and repacks as when the model was first loaded."""

    init_info_cls = SharedInitInfo
    update_info_cls = SharedUpdateInfo

    def init_transfer_engine(self, init_info: SharedInitInfo) -> None:
        """No connection is needed."""

    def start_weight_update(self) -> None:
        if self.device.type == "cpu":
            forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_heads(self.model)

    def receive_weights(self, update_info: SharedUpdateInfo) -> None:
        """Raises InvariantError for bits that are not those that were published."""
        load_shared(self.model, update_info, device=self.device)

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


def forget_expert_kernels(model: torch.nn.Module) -> None:
    """Lets the coming reload pack the weights of experts for vLLM's CPU kernels, as when they were first loaded.

    vLLM packs them when it makes a layer's kernel, and keeps that kernel over a reload, which is right where a kernel
    takes the weights as they are: on a CPU it would read unpacked numbers as packed ones, with no error (0.32.0).
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def register() -> None:
    """Makes the transfers known to vLLM in this process. Idempotent."""
    if WEIGHT_TRANSFERS["host"] in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFERS["host"], SharedWeightTransfer)
    for kind, name in (("nccl", "NcclWeightTransfer"), ("ipc", "IpcWeightTransfer")):
        WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFERS[kind], DEVICE_WORKER, name)


class WorkerExtension:
    """Mixed into vLLM's worker class. vLLM imports it for that in the worker's process, which is where the transfer
    has to be known, and where the owner of the engine is watched."""


register()
watch_owner()
if current_platform.is_cpu():
    pass_the_check()
    let_the_cpu_runner_return_experts()
