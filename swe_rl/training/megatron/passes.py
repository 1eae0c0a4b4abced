"""Forward and backward passes over micro-batches, by megatron-core's own schedules (one stage, 1F1B, interleaved).

The last stage computes the loss with our vocabulary-parallel head. Megatron takes it as three values, (loss, tokens,
statistics), of which it divides nothing: token weights hold every denominator, so gradients are only ever added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swe_rl import ops
from swe_rl.config import AlgoConfig
from swe_rl.training.megatron.core_attention import packed_params
from swe_rl.training.megatron.grid import Grid
from swe_rl.training.megatron.model import run_stage
from swe_rl.training.megatron.rows import RankRow
from swe_rl.training.policy_model import loss_columns, loss_rules
from swe_rl.training.stats import StepTotals

Scored = tuple[int, Tensor, Tensor]  # index of the row, which of its targets, their logprobs; on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The model chunks of this process and what it needs for a pass."""

    chunks: Sequence[Any]  # of the model, one but for an interleaved pipeline
    grid: Grid
    vocab: int  # without padding

    def train(self, rows: Sequence[RankRow], *, algo: AlgoConfig, objective: str, totals: StepTotals) -> None:
        """Adds the gradients of all rows, and on the last stage their statistics to `totals`. Collective."""

        def head(row: RankRow, hidden: Tensor, weight: Tensor) -> Tensor:
            loss, stats = self._loss(row, hidden, weight, algo=algo, objective=objective)
            counted = loss.detach() if self.grid.tensor.rank == 0 else torch.zeros_like(loss)
            totals.add(row.targets, counted, stats, on_policy_data=objective == "policy_gradient")
            return loss

        def reduced(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

        self._run(rows, head, lambda row: reduced)

    @torch.no_grad()
    def score(self, rows: Sequence[RankRow]) -> list[Scored]:
        """Logprobs of this context parallel rank's trained targets, on the last stage; [] elsewhere. Collective."""

        def kept(row: RankRow, logprobs: Tensor, *, non_loss_data: bool = True) -> Scored:
            return row.index, row.chosen, logprobs.float().cpu()

        found: list[Scored] = self._run(rows, self._logprobs, lambda row: partial(kept, row), collect=True)
        return found if self.grid.tensor.rank == 0 else []

    def _run(
        self,
        rows: Sequence[RankRow],
        head: Callable[[RankRow, Tensor, Tensor], Tensor],
        result_of: Callable[[RankRow], Callable[..., Any]],
        *,
        collect: bool = False,
    ) -> list[Any]:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        def step(source: Iterator[RankRow], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            row = next(source)
            return run_stage(model, row.inputs.input_ids, packed_params(row.inputs), partial(head, row)), result_of(row)

        interleaved = len(self.chunks) > 1
        found: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(rows) for _ in self.chunks] if interleaved else iter(rows),
            model=list(self.chunks) if interleaved else self.chunks[0],
            num_microbatches=len(rows),
            seq_length=self.grid.tensor.size * self.grid.context.size,  # not read: lengths vary
            micro_batch_size=1,
            forward_only=collect,
            collect_non_loss_data=collect,
        )
        return found

    def _loss(
        self, row: RankRow, hidden: Tensor, weight: Tensor, *, algo: AlgoConfig, objective: str
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As PolicyModel.forward. Tensor parallel ranks bring the targets of their own tokens, the loss is of all."""
        batch, grid = row.targets, self.grid
        terms: Any = {"ratio_rule": "on_policy"}  # of a row that trains nothing, on any rank
        if bool(row.inputs.loss_mask.any()):
            rules = loss_rules(algo, objective, has_old=batch.old_logprobs is not None)
            terms = {**loss_columns(batch, algo, objective), **rules}
        return ops.linear_policy_loss(
            hidden[row.rows],
            weight,
            batch.labels,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            token_weights=batch.token_weights,
            temperature=1.0 if batch.temperature is None else batch.temperature,
            vocab_size=self.vocab,
            tp_group=grid.tensor.group if grid.tensor.size > 1 else None,
            sequence_parallel=grid.sequence_parallel,
            trained_rows=torch.arange(len(row.rows), device=hidden.device),
            **terms,
        )

    def _logprobs(self, row: RankRow, hidden: Tensor, weight: Tensor) -> Tensor:
        batch, grid = row.targets, self.grid
        if grid.sequence_parallel:
            whole = hidden.new_empty(grid.tensor.size * len(hidden), hidden.shape[1])
            dist.all_gather_single(whole, hidden.contiguous(), group=grid.tensor.group)
            hidden = whole
        logprobs, _ = ops.linear_logprob(
            hidden[row.rows],
            weight.detach(),
            batch.labels,
            temperature=1.0 if batch.temperature is None else batch.temperature,
            vocab_size=self.vocab,
            tp_group=grid.tensor.group if grid.tensor.size > 1 else None,
        )
        return logprobs
