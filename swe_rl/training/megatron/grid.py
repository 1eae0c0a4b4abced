"""The processes of a Megatron run: who shares a tensor, a row, a stage of the pipeline, a copy of the model.

Ranks are laid out as megatron-core does, tensor parallel ones next to each other ("tp-cp-ep-dp-pp"). A replica is what
holds one copy of the model: its tensor, context and pipeline parallel ranks work on the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from swe_rl.config import TrainerConfig
from swe_rl.errors import ConfigError
from swe_rl.training import mesh
from swe_rl.training.megatron import host_device
from swe_rl.training.megatron.convert_units import MegatronLayout, Rank

TIMEOUT = timedelta(seconds=mesh.TIMEOUT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The ranks along one dimension of the grid, this one among them."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Of this process; made by `open_grid`."""

    layout: MegatronLayout
    device: torch.device
    tensor: Axis
    context: Axis
    pipeline: Axis
    expert: Axis
    data: Axis  # those that hold the same weights: data and context parallel ranks
    expert_data: Axis  # as `data`, of the weights of experts
    ends: dist.ProcessGroup | None  # first and last stage, which both hold a tied embedding
    replica: dist.ProcessGroup  # gloo, for objects on the host

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def sequence_parallel(self) -> bool:
        """Tokens between the matrix products are split over the tensor parallel ranks."""
        return self.tensor.size > 1

    @property
    def place(self) -> Rank:
        """Of its first model chunk."""
        return Rank(tensor=self.tensor.rank, pipeline=self.pipeline.rank, expert=self.expert.rank)


def grid_sizes(cfg: TrainerConfig, *, world_size: int) -> MegatronLayout:
    """The layout that the keys ask for. ConfigError, naming keys, when the processes cannot be shared out so."""
    used = cfg.tensor_parallel * cfg.context_parallel * cfg.pipeline_parallel
    keys = (
        f"trainer.tensor_parallel={cfg.tensor_parallel}, trainer.context_parallel={cfg.context_parallel} and "
        f"trainer.pipeline_parallel={cfg.pipeline_parallel}"
    )
    if world_size % used:
        raise ConfigError(
            f"{keys} take {used} processes for one copy of the model, which do not divide the {world_size} that were "
            "started: start a multiple with torchrun, or lower one of them"
        )
    copies = world_size // (cfg.tensor_parallel * cfg.pipeline_parallel)
    if copies % cfg.expert_parallel:
        raise ConfigError(
            f"trainer.expert_parallel={cfg.expert_parallel} does not divide the {copies} data and context parallel "
            f"ranks that {keys} leave of {world_size} processes: lower it"
        )
    return MegatronLayout(
        tensor_parallel=cfg.tensor_parallel,
        pipeline_parallel=cfg.pipeline_parallel,
        virtual_pipeline=cfg.virtual_pipeline,
        expert_parallel=cfg.expert_parallel,
    )


def open_grid(cfg: TrainerConfig, *, device: torch.device) -> Grid:
    """Makes the process groups of the layout. Collective; once per process, and again only with equal sizes."""
    layout = grid_sizes(cfg, world_size=mesh.world_size())
    if not dist.is_initialized():  # a single process: megatron-core needs a group all the same
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if device.type == "cpu":
        host_device.install()
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cfg.tensor_parallel,
        pipeline_model_parallel_size=cfg.pipeline_parallel,
        virtual_pipeline_model_parallel_size=cfg.virtual_pipeline if cfg.virtual_pipeline > 1 else None,
        context_parallel_size=cfg.context_parallel,
        expert_model_parallel_size=cfg.expert_parallel,
        expert_tensor_parallel_size=cfg.tensor_parallel,
        distributed_timeout_minutes=int(TIMEOUT.total_seconds() // 60),
        create_gloo_process_groups=False,
    )
    _no_random_numbers()
    return Grid(
        layout=layout,
        device=device,
        tensor=_axis(parallel_state.get_tensor_model_parallel_group()),
        context=_axis(parallel_state.get_context_parallel_group()),
        pipeline=_axis(parallel_state.get_pipeline_model_parallel_group()),
        expert=_axis(parallel_state.get_expert_model_parallel_group()),
        data=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert_data=_axis(parallel_state.get_expert_data_parallel_group()),
        ends=_ends(parallel_state) if cfg.pipeline_parallel > 1 else None,
        replica=_replica(parallel_state.get_data_parallel_rank()),
    )


def _axis(group: Any) -> Axis:
    return Axis(group=group, rank=dist.get_rank(group), size=dist.get_world_size(group))


def _ends(parallel_state: Any) -> Any:
    """None on stages between them."""
    inside = parallel_state.is_rank_in_embedding_group(ignore_virtual=True)
    return parallel_state.get_embedding_group() if inside else None


def _replica(data_rank: int) -> Any:
    """The group of this process's replica; every process makes those of all, in one order."""
    homes = mesh.gather_objects([(data_rank, mesh.rank())])
    mine = None
    for replica in sorted({home for home, _ in homes}):
        ranks = [rank for home, rank in homes if home == replica]
        group = dist.new_group(ranks, timeout=TIMEOUT, backend="gloo")
        if replica == data_rank:
            mine = group
    return mine


def _no_random_numbers() -> None:
    """Weights are loaded and there is no dropout, so nothing of a step is random: states need not be kept apart."""
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
