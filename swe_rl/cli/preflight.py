"""What a configuration asks for against what is there: checked before a run directory exists or a phase has run."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from swe_rl.config import ClusterConfig, TrainConfig, check_context, phase_config
from swe_rl.errors import ConfigError
from swe_rl.sandbox.oci import default_store

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


# group -> (backends that have a schema, so that recipes are complete, but cannot run yet; what to choose instead)
NOT_BUILT = {
    "sandbox": (("kubernetes",), "sandbox=local"),
}


def check_backends(cfg: TrainConfig) -> None:
    """Raises ConfigError for a backend that cannot run yet, an image that was not imported, or heads that the ranks
    cannot share."""
    if cfg.sandbox.image and cfg.sandbox.backend == "local" and cfg.rollout.backend == "local":
        default_store().find(cfg.sandbox.image)
    if cfg.model.lora_rank:
        _check_adapters(cfg)
    if cfg.trainer.context_scheme == "heads":
        _check_heads(cfg)
    for group, (missing, instead) in NOT_BUILT.items():
        backend = getattr(cfg, group).backend
        if backend in missing:
            raise ConfigError(
                f"{group}.backend={backend} cannot run yet: choose {instead} (--cfg job prints the recipe all the same)"
            )
    if cfg.trainer.backend == "megatron":
        _check_megatron(cfg)
    for phase in cfg.phases:
        if phase.data == "judged_rollouts":
            raise ConfigError(f"phases.{phase.name}.data=judged_rollouts is a verifier: use swe-rl verify train")


def _check_adapters(cfg: TrainConfig) -> None:
    """Checkpoints hold adapters alone, and so do updates of the engine: nothing may need whole weights of before."""
    key = f"model.lora_rank={cfg.model.lora_rank}"
    for index, phase in enumerate(cfg.phases):
        if phase.cache:
            raise ConfigError(f"{key}: phases.{phase.name}.cache keeps whole weights, set it to false")
        if index and phase_config(cfg, phase).algo.kl_coeff:
            raise ConfigError(
                f"{key}: the reference of phases.{phase.name} (algo.kl_coeff) is the phase before it, which a resumed "
                "run no longer has: set algo.kl_coeff=0 there, or begin a run with this phase"
            )


def _check_heads(cfg: TrainConfig) -> None:
    """Of a model whose numbers of heads are known without loading it; the trainer looks again at every model."""
    from swe_rl.training.micro_batches import check_heads
    from swe_rl.training.planning.shapes import model_shape

    try:
        shape = model_shape(cfg.model)
    except ConfigError:  # of no family that the table of dimensions has
        return
    check_heads(cfg.trainer, shape.num_heads, shape.num_kv_heads)


def _check_megatron(cfg: TrainConfig) -> None:
    """ConfigError for what the Megatron trainer does not have, or when megatron-core is not there."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ConfigError(
            "trainer.backend=megatron needs megatron-core: pip install 'swe-rl[megatron]', or choose trainer=adamw"
        )
    if cfg.model.lora_rank:
        raise ConfigError(
            f"model.lora_rank={cfg.model.lora_rank}: trainer.backend=megatron trains whole weights, set it to 0"
        )
    for phase in cfg.phases:
        if phase_config(cfg, phase).algo.advantage == "gae":
            raise ConfigError(
                f"phases.{phase.name}: algo.advantage=gae needs a value head, which trainer.backend=megatron lacks: "
                "choose another advantage, or trainer=adamw"
            )


def check_cluster(cfg: ClusterConfig, *, world_size: int) -> None:
    """Raises ConfigError if the processes that were started are not those that the recipe was made for."""
    wanted = cfg.num_nodes * cfg.gpus_per_node
    if wanted and wanted != world_size:
        raise ConfigError(
            f"cluster.num_nodes={cfg.num_nodes} and cluster.gpus_per_node={cfg.gpus_per_node} are for {wanted} "
            f"training processes, {world_size} were started: start as many with torchrun, or choose cluster=any"
        )


def check_counts(cfg: TrainConfig, *, num_tasks: int, world_size: int) -> None:
    """Raises ConfigError if a phase wants more training tasks at once than there are, or fewer than ranks, and if the
    ranks do not fall into context groups."""
    check_context(cfg.trainer, world_size=world_size)
    if cfg.trainer.backend == "megatron":
        from swe_rl.training.megatron.grid import grid_sizes

        grid_sizes(cfg.trainer, world_size=world_size)
    for phase in cfg.phases:
        key = "tasks_per_step" if phase.data == "rollouts" else "num_tasks"
        wanted = getattr(phase, key)
        if wanted > num_tasks:
            raise ConfigError(
                f"phases.{phase.name}.{key}={wanted}, but there are {num_tasks} training tasks: lower it, or raise "
                "task.num_train"
            )
        if phase.data == "rollouts" and wanted < world_size:
            raise ConfigError(
                f"phases.{phase.name}.{key}={wanted} leaves some of {world_size} ranks without a task: raise it, or "
                "start fewer processes"
            )


def check_cache(cfg: TrainConfig, model_config: Any, *, device: torch.device) -> None:
    """Raises ConfigError if the embedded engine's keys and values cannot fit on `device`; vLLM sees to its own.
    model_config: of transformers."""
    if cfg.engine.backend != "embedded":
        return
    heads = model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // heads
    per_token = 2 * model_config.num_hidden_layers * model_config.num_key_value_heads * head_dim
    slot = per_token * cfg.agent.max_context_tokens * ITEM_BYTES[cfg.engine.dtype]
    free = _free_bytes(device)
    if cfg.engine.num_slots * slot > free:
        raise ConfigError(
            f"engine.num_slots={cfg.engine.num_slots} of agent.max_context_tokens={cfg.agent.max_context_tokens} need "
            f"{cfg.engine.num_slots * slot / 2**30:.1f} GiB for keys and values, {device} has {free / 2**30:.1f} GiB: "
            f"a slot takes {slot / 2**30:.2f} GiB, lower one of the two"
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
