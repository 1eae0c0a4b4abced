"""The torch trainer: packed rows in, one optimiser step out, on one process or many, replicated or sharded (FSDP2).

Split invariance: token weights carry global denominators, so gradients of micro-batches and of ranks are only ever
added, over data-parallel ranks and over those that have parts of one row alike. Ranks may bring different numbers of
rows; missing ones are rows that train nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from swe_rl.config import AlgoConfig, TrainerConfig
from swe_rl.errors import ConfigError, InvariantError
from swe_rl.models.costs import pair_cost
from swe_rl.ops.context_parallel import ContextGroup
from swe_rl.training import mesh
from swe_rl.training.masters import FULL_PRECISION, MasterWeights, full_tensor, sum_gradients
from swe_rl.training.micro_batches import MicroBatch, MicroBatches, micro_batches, open_context, to_device
from swe_rl.training.model_setup import broadcast, cast, set_checkpointing, switch_dropout_off
from swe_rl.training.module_norms import module_norms
from swe_rl.training.optim import NamedOptimizer
from swe_rl.training.policy_model import OBJECTIVES, PolicyModel
from swe_rl.training.reference_scores import ReferenceScores
from swe_rl.training.sharding import free_gathered, shard
from swe_rl.training.stats import StepTotals, peak_memory_bytes
from swe_rl.training.weight_adapters import merged
from swe_rl.types import PackedBatch, StepStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class TorchBackend(ReferenceScores):
    """Implements protocols.TrainerBackend. Collective under torchrun: every rank calls every method, in one order.

    `objective` ("policy_gradient" or "cross_entropy") is the default of train_step. `dtype` is that of the forward
    pass (default: the model's parameters'); masters are fp32 (fp64 for an fp64 model). `policy_version` counts
    optimiser steps that moved the weights, `step` counts calls of train_step.
    """

    masters: MasterWeights
    dtype: torch.dtype  # of the forward pass

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
        self.sharded = cfg.fsdp
        self.context_parallel, self.context = cfg.context_parallel, open_context(cfg, model.config)
        self.policy_version, self.step, self.num_skipped_steps = 0, 0, 0
        set_checkpointing(model, cfg.activation_checkpointing)
        switch_dropout_off(model)
        model.to(self.device)  # type: ignore[arg-type]
        self.policy = PolicyModel(model)
        self.pair_cost = pair_cost(model)
        self._prepare(dtype or next(model.parameters()).dtype)
        self.new_phase(cfg, algo=algo, objective=objective)

    def _change_dtype(self, dtype: torch.dtype) -> None:
        if self.sharded:
            raise ConfigError(
                "model.dtype cannot change between phases with trainer.fsdp: set it once for the whole run"
            )
        exact = {name: weight.clone() for name, weight in self.masters.full().items()}
        self.masters.detach()
        cast(self.model, dtype)
        self.masters, self.dtype = MasterWeights(self.model), dtype
        self.masters.load(exact)

    def _prepare(self, dtype: torch.dtype) -> None:
        """Equal weights on all ranks, masters before rounding to `dtype`, shards where asked for."""
        self.dtype = dtype
        if self.sharded:
            cast(self.model, torch.float32, only=lambda d: d not in FULL_PRECISION)
        broadcast(self.model)
        if self.sharded:
            shard(self.policy, dtype=dtype, device=self.device)
            self.masters = MasterWeights(self.model)
            return
        exact = {name: p.detach() for name, p in self.model.named_parameters() if p.dtype in FULL_PRECISION}
        cast(self.model, dtype)
        self.masters = MasterWeights(self.model)
        if dtype not in FULL_PRECISION and exact:
            self.masters.load({**self.masters.full(), **exact})

    def new_phase(
        self,
        cfg: TrainerConfig,
        *,
        algo: AlgoConfig,
        objective: str = "policy_gradient",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Keeps the weights and their version; starts with a fresh optimiser at step 0, and with another `dtype` of the
        forward pass if given.

        Raises ConfigError for settings that cannot take effect or need another backend object.
        """
        if objective not in OBJECTIVES:
            raise ConfigError(f"objective={objective!r} is unknown: use one of {', '.join(OBJECTIVES)}")
        if cfg.fsdp != self.sharded:
            raise ConfigError("trainer.fsdp cannot change between phases: set it once for the whole run")
        if cfg.context_parallel != self.context_parallel:
            raise ConfigError("trainer.context_parallel cannot change between phases: set it once for the whole run")
        if cfg.fsdp and cfg.optimizer == "muon":
            raise ConfigError("trainer.optimizer=muon needs whole matrices: set trainer.fsdp=false or use adamw")
        if cfg.max_grad_norm <= 0:
            raise ConfigError(f"trainer.max_grad_norm must be positive (.inf: no clipping), got {cfg.max_grad_norm}")
        if dtype is not None and dtype != self.dtype:
            self._change_dtype(dtype)
        self.cfg, self.algo, self.objective = cfg, algo, objective
        set_checkpointing(self.model, cfg.activation_checkpointing)
        self.policy.attention = cfg.attention
        self.policy.value_head = self._new_value_head() if algo.advantage == "gae" else None
        self.optimizer = NamedOptimizer(
            self.masters.params, cfg, extra=self._value_params, extra_rate=algo.value_learning_rate
        )
        self.optimizer.zero_grad()
        self.reference = self.masters.snapshot() if algo.kl_coeff and objective == "policy_gradient" else None
        self.step = 0

    def _new_value_head(self) -> nn.Linear:
        """All zeros: before it has learnt anything, every state is worth 0. In fp32 (fp64 for an fp64 model)."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        head = nn.Linear(self.model.config.hidden_size, 1, dtype=wide, device=self.device)
        for param in head.parameters():
            nn.init.zeros_(param)
        return head

    @property
    def _value_params(self) -> dict[str, nn.Parameter]:
        head = self.policy.value_head
        return {} if head is None else {f"value_head.{name}": param for name, param in head.named_parameters()}

    def train_step(
        self, batches: Sequence[PackedBatch], *, learning_rate: float, objective: str | None = None
    ) -> StepStats:
        """One optimiser step over this rank's micro-batches; gradients are summed over micro-batches and ranks.

        Batches without old_logprobs are on-policy (the old policy is the current one), which is exact for one
        optimiser step per batch; for several, call score_old first. A step without a trained token on any rank, or
        with a non-finite gradient, leaves weights and optimiser alone (`skipped`, num_skipped_steps).
        Raises InvariantError for non-finite token weights, ConfigError for a missing input of the loss.
        """
        started = time.perf_counter()
        totals = self.backward(batches, objective=objective or self.objective)
        group_norms = module_norms(self.masters.params)
        grad_norm, skipped = self._update(learning_rate, num_loss_tokens=totals.num_loss_tokens)
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
            group_norms=group_norms,
        )

    def backward(self, batches: Sequence[PackedBatch], *, objective: str) -> StepTotals:
        """The gradient of the whole step, summed over micro-batches and ranks, and its statistics; no update."""
        for batch in batches:
            _check(batch)
        totals = StepTotals()
        self.model.train()
        self.optimizer.zero_grad()
        for given in self._inputs(self._micro_batches(batches)):
            loss, stats = self.policy(
                given.batch,
                given.rows,
                algo=self.algo,
                objective=objective,
                head_impl=self.cfg.head_impl,
                value_rows=given.states,
                context=given.context,
            )
            loss.backward()
            totals.add(given.batch, loss.detach(), stats, on_policy_data=objective == "policy_gradient")
        if not self.sharded and mesh.world_size() > 1:
            sum_gradients(self.masters.params)
        if mesh.world_size() > 1 and self._value_params:
            sum_gradients(self._value_params)
        totals.reduce()
        return totals

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients of the masters by name, after backward(); parameters without one are left out. Collective."""
        return {n: full_tensor(p.grad) for n, p in self.masters.params.items() if p.grad is not None}

    def _update(self, learning_rate: float, *, num_loss_tokens: int) -> tuple[float, bool]:
        """(global gradient norm before clipping, skipped). The norm is the same on every rank, so is the decision."""
        params = [p for p in self.masters.params.values() if p.grad is not None]
        total = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        total = total.full_tensor() if hasattr(total, "full_tensor") else total
        grad_norm = float(total)
        value_grads = [p.grad for p in self._value_params.values() if p.grad is not None]
        value_norm = nn.utils.get_total_norm(value_grads)
        skipped = num_loss_tokens == 0 or not math.isfinite(grad_norm + float(value_norm))
        if skipped:
            log.warning("step %d skipped: gradient norm %s, %d loss tokens", self.step, grad_norm, num_loss_tokens)
        else:
            nn.utils.clip_grads_with_norm_(params, self.cfg.max_grad_norm, total)
            nn.utils.clip_grads_with_norm_(self._value_params.values(), self.cfg.max_grad_norm, value_norm)
            self.optimizer.step(learning_rate=learning_rate)
            self.masters.publish()
        self.optimizer.zero_grad()
        return grad_norm, skipped

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """[T] fp32 per batch on the CPU, at each token's temperature, NaN where not trained; same code as training."""
        self.model.eval()
        work, impl = self._micro_batches(batches), self.cfg.head_impl
        scored = [
            self.policy(given.batch, given.rows, head_impl=impl, context=given.context)[0].float().cpu()
            for given in self._inputs(work)
        ]
        free_gathered(self.policy)
        return work.own_results(scored)

    @torch.no_grad()
    def values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """[T] per batch on the CPU: the value of the state behind each finite entry of value_targets, NaN elsewhere."""
        self.model.eval()
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        work, scored = self._micro_batches(batches), []
        for given in self._inputs(work):
            states = nothing if given.states is None else given.states
            scored.append(self.policy(given.batch, given.rows, value_rows=states, context=given.context)[0].cpu())
        free_gathered(self.policy)
        return work.own_results(scored)

    def weights(self) -> Mapping[str, Tensor]:
        """Full fp32 parameters by Hugging Face name, adapters merged; a tied one appears once, under its first name.

        Collective. Unless sharded these are views that the next train_step changes: clone to keep.
        """
        return merged(self.model, self.masters.full())

    def state_dict(self, *, keep: bool = True, own: bool = False) -> Mapping[str, Any]:
        """Weights, optimiser state, counters: full tensors that load under any number of ranks. Views, as weights(), or
        with `own` copies on the host; sharded ones are gathered one by one into host memory, and without `keep` this
        rank does not hold them."""
        return {
            "model": self.masters.full_on_host(keep=keep, own=own),
            "optimizer": self.optimizer.state_dict(keep=keep, own=own),
            "step": self.step,
            "policy_version": self.policy_version,
            "num_skipped_steps": self.num_skipped_steps,
        }

    def checkpoint_state(self, *, own: bool = False) -> Mapping[str, Any]:
        """As protocols.TrainerBackend: everything on rank 0."""
        return self.state_dict(keep=mesh.is_main(), own=own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`. Raises CheckpointError when it does not fit the model or the optimiser."""
        self.masters.load(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])
        self.policy_version = int(state["policy_version"])
        self.num_skipped_steps = int(state["num_skipped_steps"])

    def load_weights(self, weights: Mapping[str, Tensor], *, policy_version: int | None = None) -> None:
        """Replaces the weights only; optimiser state stays. Raises CheckpointError when names or shapes do not fit."""
        self.masters.load(weights)
        if policy_version is not None:
            self.policy_version = policy_version

    def _micro_batches(self, rows: Sequence[PackedBatch]) -> MicroBatches:
        return micro_batches(rows, self.context, pair_cost=self.pair_cost)

    def _inputs(self, work: MicroBatches) -> list[_Input]:
        """On this device: copies run while the first passes compute."""
        return [_Input.of(each, self.device) for each in work.passes]


class _Input(NamedTuple):
    """What PolicyModel takes for one pass."""

    batch: PackedBatch
    rows: Tensor  # indices of the trained targets
    states: Tensor | None  # indices of the states whose value is asked for
    context: ContextGroup | None

    @classmethod
    def of(cls, work: MicroBatch, device: torch.device) -> _Input:
        batch, states = work.batch, work.value_rows
        rows = batch.loss_mask.nonzero(as_tuple=True)[0]  # on the host: a GPU is not waited for
        return cls(
            to_device(batch, device),
            rows.to(device, non_blocking=True),
            None if states is None else states.to(device, non_blocking=True),
            work.context,
        )


def _check(batch: PackedBatch) -> None:
    if not bool(torch.isfinite(batch.token_weights[batch.loss_mask]).all()):
        raise InvariantError("a trained token has no finite token weight: call algorithms.token_weights before pack")
