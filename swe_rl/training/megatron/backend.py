"""The Megatron trainer: packed rows in, one optimiser step out, over tensor, context, pipeline and data parallel ranks.

Layers, parallel linear layers and pipeline schedules are megatron-core's; attention, rotary embedding, norm, head and
loss are ours (core_attention, norm, passes), as are masters and optimiser (sharded_masters). Every rank brings the rows
of its own rollouts, as in the torch backend; the ranks of one replica work on all of theirs together.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swe_rl.batching import empty_batch
from swe_rl.config import AlgoConfig, TrainerConfig
from swe_rl.errors import CheckpointError, ConfigError, InvariantError
from swe_rl.models.costs import pair_cost
from swe_rl.models.rope import rope_from_config
from swe_rl.training import mesh
from swe_rl.training.megatron.convert import open_reader
from swe_rl.training.megatron.core_attention import PackedCoreAttention
from swe_rl.training.megatron.grid import Grid, open_grid
from swe_rl.training.megatron.model import build_chunks
from swe_rl.training.megatron.parts import Exchange, Part, local_parts
from swe_rl.training.megatron.passes import Passes, Scored
from swe_rl.training.megatron.publish import ReplicaWeightSource
from swe_rl.training.megatron.rows import rank_row, replica_rows
from swe_rl.training.megatron.sharded_masters import EVERY, MOMENTS, NONE, ShardedAdamW, ShardedMasters
from swe_rl.training.planning.shapes import shape_from_config
from swe_rl.training.policy_model import OBJECTIVES
from swe_rl.training.reference_scores import ReferenceScores
from swe_rl.training.stats import StepTotals, peak_memory_bytes
from swe_rl.types import PackedBatch, StepStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grads_with_norm_


class MegatronBackend(ReferenceScores):
    """Implements protocols.TrainerBackend. Collective: every rank calls every method, in one order.

    Takes the weights of `model` and then leaves it without (`model` keeps config and rotary embedding); of a model on
    the meta device it reads what this rank holds from the files in model.config.name_or_path. `dtype` is that
    of the forward pass; masters are fp32 (fp64 for fp64). `policy_version` counts optimiser steps that moved the
    weights, `step` calls of train_step. Raises ConfigError for a layout or a model that cannot be.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: TrainerConfig,
        *,
        algo: AlgoConfig,
        objective: str = "policy_gradient",
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.device = model, torch.device(device)
        self.dtype = dtype or next(model.parameters()).dtype
        self.policy_version, self.step, self.num_skipped_steps = 0, 0, 0
        self.pair_cost = pair_cost(model)
        self.grid: Grid = open_grid(cfg, device=self.device)
        self.shape = shape_from_config(model.config, name=model.config.name_or_path or "the model")
        self._build(cfg, self.dtype)
        if any(param.is_meta for param in model.parameters()):
            self._read(Path(str(model.config.name_or_path)))
        else:
            self._load(dict(model.named_parameters()))
            _without_weights(model)
        self.layout_keys = _layout_keys(cfg)
        self.new_phase(cfg, algo=algo, objective=objective)

    def _build(self, cfg: TrainerConfig, dtype: torch.dtype) -> None:
        """Stage and masters without values."""
        self.dtype = dtype
        self.stage = build_chunks(self.model.config, self.shape, self.grid, cfg, dtype=dtype)
        self._rope = rope_from_config(self.model.config)
        self.parts = local_parts(list(self.stage), self.shape, self.grid)
        self.exchange = Exchange(self.parts, self.shape, self.grid)
        self.passes = Passes(chunks=list(self.stage), grid=self.grid, vocab=self.shape.vocab)
        self.masters = ShardedMasters(self.parts, self.exchange, self.grid, offload=cfg.offload)

    def new_phase(
        self,
        cfg: TrainerConfig,
        *,
        algo: AlgoConfig,
        objective: str = "policy_gradient",
        dtype: torch.dtype | None = None,
    ) -> None:
        """As TorchBackend.new_phase: keeps weights and version, starts a fresh optimiser at step 0."""
        if objective not in OBJECTIVES:
            raise ConfigError(f"objective={objective!r} is unknown: use one of {', '.join(OBJECTIVES)}")
        if _layout_keys(cfg) != self.layout_keys:
            raise ConfigError("the keys of trainer cannot change between phases, the optimiser's and the rate apart")
        if algo.advantage == "gae":
            raise ConfigError("algo.advantage=gae needs a value head, which trainer.backend=megatron lacks: use torch")
        if dtype is not None and dtype != self.dtype:
            exact = self.masters.snapshot()
            self._build(cfg, dtype)
            self.masters.restore(exact)
        self.cfg, self.algo, self.objective = cfg, algo, objective
        self.optimizer = ShardedAdamW(self.masters, cfg)
        self.masters.zero_grad()
        keeps = bool(algo.kl_coeff) and objective == "policy_gradient"
        self.reference = self.masters.snapshot() if keeps else None
        self.step = 0

    def train_step(
        self, batches: Sequence[PackedBatch], *, learning_rate: float, objective: str | None = None
    ) -> StepStats:
        """As TorchBackend.train_step, over the rows of all ranks."""
        started = time.perf_counter()
        totals = self.backward(batches, objective=objective or self.objective)
        squares = self.masters.squared_norms()
        grad_norm = math.sqrt(sum(squares.values()))
        skipped = self._update(learning_rate, grad_norm, num_loss_tokens=totals.num_loss_tokens)
        self.step += 1
        self.policy_version += not skipped
        self.num_skipped_steps += skipped
        return totals.finish(
            step=self.step,
            policy_version=self.policy_version,
            grad_norm=grad_norm,
            skipped=skipped,
            seconds=time.perf_counter() - started,
            peak_memory=peak_memory_bytes(self.device),
            group_norms={name: math.sqrt(square) for name, square in squares.items()},
        )

    def backward(self, batches: Sequence[PackedBatch], *, objective: str) -> StepTotals:
        """The gradient of the whole step, summed over micro-batches and ranks, and its statistics; no update."""
        for batch in batches:
            if not bool(torch.isfinite(batch.token_weights[batch.loss_mask]).all()):
                raise InvariantError("a trained token has no finite token weight: call algorithms.token_weights first")
        self._follow_rope()
        totals = StepTotals()
        self.masters.zero_grad()
        rows, _ = replica_rows(batches, self.grid)
        prepared = [rank_row(batch, index, self.grid, scoring=False) for index, batch in enumerate(rows)]
        self.stage.train()
        self.passes.train(prepared, algo=self.algo, objective=objective, totals=totals)
        if not self.grid.is_last_stage:  # it has seen no loss: nothing to add, but it takes part in the sums
            nothing = torch.zeros(0, device=self.device)
            stats = {"logprobs": nothing, "ratio": nothing, "entropy": nothing, "clipped": nothing.bool()}
            totals.add(empty_batch(), torch.zeros((), device=self.device), stats, on_policy_data=False)
        self.masters.reduce()
        totals.reduce()
        return totals

    def _update(self, learning_rate: float, grad_norm: float, *, num_loss_tokens: int) -> bool:
        """True when the step was skipped: the norm is that of all ranks, so all decide alike."""
        skipped = num_loss_tokens == 0 or not math.isfinite(grad_norm)
        if skipped:
            log.warning("step %d skipped: gradient norm %s, %d loss tokens", self.step, grad_norm, num_loss_tokens)
        else:
            factor = self.cfg.max_grad_norm / (grad_norm + CLIP_EPS)
            if factor < 1:
                self.masters.scale_gradients(factor)
            self.optimizer.step(learning_rate=learning_rate)
            self.masters.publish()
        self.masters.zero_grad()
        return skipped

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients by Hugging Face name, after backward(). Collective."""
        return self.masters.full(lambda part: _gradient(self.masters.of(part)))

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """[T] fp32 per batch on the CPU, at each token's temperature, NaN where not trained; same code as training."""
        self._follow_rope()
        rows, own = replica_rows(batches, self.grid)
        prepared = [rank_row(batch, index, self.grid, scoring=True) for index, batch in enumerate(rows)]
        self.stage.eval()
        scored = self._of_replica(self.passes.score(prepared))
        found = [torch.full((len(batch.labels),), math.nan) for batch in batches]
        for index, chosen, values in scored:
            if index in own:
                found[own.index(index)][chosen] = values
        return found

    def _of_replica(self, scored: list[Scored]) -> list[Scored]:
        size = torch.distributed.get_world_size(self.grid.replica)
        if size == 1:
            return scored
        parts: list[Any] = [None] * size
        torch.distributed.all_gather_object(parts, scored, group=self.grid.replica)
        return [each for part in parts for each in part]

    def values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        raise InvariantError("there is no value head: trainer.backend=megatron has none")

    def weights(self) -> Mapping[str, Tensor]:
        """Full fp32 parameters by Hugging Face name; a tied one appears once, under its first name. Collective."""
        return self.masters.full(self.masters.of)

    def weight_source(self, *, dtype: str, bucket_bytes: int, remember: bool) -> ReplicaWeightSource:
        """Where training.weight_sync takes updates from: no rank gathers more than a bucket. Collective."""
        return ReplicaWeightSource(self, dtype=dtype, bucket_bytes=bucket_bytes, remember=remember)

    def state_dict(self, *, keep: bool = True, spread: bool = False, own: bool = False) -> Mapping[str, Any]:
        """As TorchBackend.state_dict, and readable by it: full tensors that load in any layout, gathered one unit at a
        time into host memory; without `keep` this rank does not hold them. With `spread` it holds the optimiser's state
        of its share of the units, whatever `keep` says: checkpoint.save puts shares together. With `own` nothing is a
        view of what is trained. Collective."""
        model = self.masters.full_on_host(keep=keep, own=own)
        first = self.optimizer.state_of(self.parts[0])  # every parameter has made as many steps
        whole = EVERY if keep else NONE
        chosen = slice(mesh.rank(), None, mesh.world_size()) if spread and first else whole
        moments = {
            key: self.masters.full(partial(self._moment, key), keep=chosen, on_host=True, own=own)
            for key in MOMENTS
            if first
        }
        optimizer: dict[str, dict[str, Tensor]] = {}
        parameters = self.exchange.parameters
        for name in (name for group in parameters.groups[chosen] for name in parameters.names(group)):
            found = {key: tensors[name] for key, tensors in moments.items()}
            optimizer[name] = {"step": first["step"].clone(), **found} if first else {}
        return {
            "model": model,
            "optimizer": optimizer,
            "step": self.step,
            "policy_version": self.policy_version,
            "num_skipped_steps": self.num_skipped_steps,
        }

    def _moment(self, key: str, part: Part) -> Tensor:
        return self.optimizer.state_of(part)[key]

    def checkpoint_state(self, *, own: bool = False) -> Mapping[str, Any]:
        """As protocols.TrainerBackend: weights on rank 0, of the optimiser's state its share on every rank."""
        return self.state_dict(keep=mesh.is_main(), spread=True, own=own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`, of any layout. Raises CheckpointError when it does not fit the model."""
        self._load(state["model"])
        found: Mapping[str, Any] = state["optimizer"]
        if set(found) != set(state["model"]):
            raise CheckpointError("the optimiser state in the checkpoint belongs to a different model")
        for part in self.parts:
            states = {name: found[name] for name in self.exchange.parameters.names([part.unit])}
            if not all(states.values()):
                self.optimizer.set_state(part, {})
                continue
            if any(set(each) != {"step", *MOMENTS} for each in states.values()):
                raise CheckpointError(f"the optimiser state of {min(states)} is not AdamW's")
            cut: dict[str, Tensor] = {}
            for key in MOMENTS:
                moments = {name: each[key] for name, each in states.items()}
                cut[key] = self.masters.shard_of(part, self.exchange.own_of(part.unit, moments))
            self.optimizer.set_state(part, {"step": next(iter(states.values()))["step"], **cut})
        self.step = int(state["step"])
        self.policy_version = int(state["policy_version"])
        self.num_skipped_steps = int(state["num_skipped_steps"])

    def load_weights(self, weights: Mapping[str, Tensor], *, policy_version: int | None = None) -> None:
        """Replaces the weights only; optimiser state stays. Raises CheckpointError when names or shapes do not fit."""
        self._load(weights)
        if policy_version is not None:
            self.policy_version = policy_version

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        for part in self.parts:
            self.masters.load(part, self.exchange.own_of(part.unit, weights).to(self.device))

    def _read(self, directory: Path) -> None:
        """The parts of this process from a directory of Hugging Face or of Megatron ranks, one unit in memory."""
        with open_reader(directory) as reader:
            for part in self.parts:
                self.masters.load(part, self.exchange.own(part.unit, reader.read(part.unit)).to(self.device))

    def _follow_rope(self) -> None:
        """The rotary embedding of model.config, which a phase or a probe may have changed."""
        rope = rope_from_config(self.model.config)
        if rope != self._rope:
            self._rope = rope
            for module in self.stage.modules():
                if isinstance(module, PackedCoreAttention):
                    module.set_rope(rope)


def _gradient(master: Tensor) -> Tensor:
    assert master.grad is not None  # called only after backward()
    return master.grad


def _layout_keys(cfg: TrainerConfig) -> tuple[Any, ...]:
    pipeline = (cfg.pipeline_parallel, cfg.virtual_pipeline)
    layout = (cfg.tensor_parallel, cfg.context_parallel, *pipeline, cfg.expert_parallel)
    return (*layout, cfg.offload, cfg.activation_checkpointing, cfg.attention)


def _without_weights(model: nn.Module) -> None:
    """Parameters on the meta device: names and shapes without memory."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False))
