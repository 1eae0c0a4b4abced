"""The head in chunks of rows: logits of one chunk exist at a time, and its gradients are made while they do.

Per chunk: logits = x W' (fp32) -> row kernel: five statistics of each row -> merge over ranks -> ops.token_loss and,
by autograd on vectors of chunk length, its derivatives -> row kernel: dlogits -> dx = dlogits W, dW += dlogits' x.
Three products instead of the four of a recomputing backward pass, and the loss is written down once, in torch.
The kernels are a module (ops.cpu_rows or ops.triton_rows) with the same functions.
Letters: T tokens, M trained rows, C rows of a chunk, H hidden, V vocabulary (of this rank's shard).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from swe_rl.ops import cpu_rows, row_stats
from swe_rl.ops.head_spec import HeadSpec
from swe_rl.ops.token_loss import token_loss
from swe_rl.ops.vocab_parallel import VocabShard, gather_rows, merge_over_ranks, reduce_hidden_grad, shard_of


def kernels_of(impl: str) -> ModuleType:
    """The module of kernels behind a name."""
    if impl == "triton":
        from swe_rl.ops import triton_rows

        return triton_rows
    return cpu_rows


def usable(impl: str, *, device: str, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether the kernels behind a name can run there, and why not."""
    if impl == "cpu" and device != "cpu":
        return False, f"the tensors are on {device}"
    if impl == "triton" and dtype == torch.float64:
        return False, "the Triton kernels have no fp64"
    if impl == "triton" and device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False, f"the tensors are on {device}: Triton needs a GPU, or TRITON_INTERPRET=1 from the start"
    return kernels_of(impl).available()


class LossOutputs(NamedTuple):
    """Gradients are those of `loss` itself; stats [M] are of this rank's own rows."""

    loss: Tensor  # scalar, over the rows of all ranks of the group
    grad_hidden: Tensor  # [M, H], empty if not needed
    grad_weight: Tensor  # [V, H] fp32 (fp64), empty if not needed
    logprobs: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    columns: list[Tensor],
    spec: HeadSpec,
    *,
    need_hidden: bool,
    need_weight: bool,
    grad_weight: Tensor | None = None,
) -> LossOutputs:
    """Loss and gradients of trained rows x [M, H]; `columns` [M] as named by spec.columns.

    `grad_weight` [V, H] is added to if given, else made.
    """
    kernels, shard = kernels_of(spec.impl), shard_of(spec.tp_group, rows=len(weight), vocab_size=spec.vocab_size)
    own = slice(0, len(x))
    if spec.sequence_parallel:
        gathered = gather_rows([x, labels, *columns], shard)
        (x, labels, *columns), own = gathered.tensors, gathered.own
    rows = dict(zip(spec.columns, columns, strict=True))
    chunks = _Chunks(kernels, x, weight, labels, rows.pop("inv_temperature"), spec, shard)
    grads = _Gradients(chunks, need_hidden=need_hidden, need_weight=need_weight, grad_weight=grad_weight)
    loss, stats = chunks.inv_temperature.new_zeros(()), []
    for part, logits in chunks:
        summary = chunks.stats(part, logits)
        chosen = {name: column[part] for name, column in rows.items()}
        share, slopes, chunk_stats = _loss_and_slopes(summary, chosen, spec, with_slopes=grads.wanted)
        loss = loss + share
        stats.append(chunk_stats)
        grads.add(part, logits, slopes)
    grads.finish()
    return LossOutputs(loss, grads.hidden[own], grads.weight, *(column[own].clone() for column in _joined(stats, loss)))


def logprobs(x: Tensor, weight: Tensor, labels: Tensor, inv_temperature: Tensor, spec: HeadSpec) -> Tensor:
    """[T, 5] merged statistics of x [T, H]; no [T, V] tensor and, with Triton, none of size V."""
    kernels, shard = kernels_of(spec.impl), shard_of(spec.tp_group, rows=len(weight), vocab_size=spec.vocab_size)
    parts = kernels.streaming_stats(
        x, weight, shard.local_labels(labels), inv_temperature, softcap=spec.softcap, num_valid=shard.num_valid
    )
    return merge_over_ranks(row_stats.merge(parts), shard)


def logprobs_backward(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    inv_temperature: Tensor,
    slopes: Tensor,
    spec: HeadSpec,
    *,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """(grad_hidden [T, H], grad_weight [V, H] fp32) for row_stats.slopes [T, 5]; logits are computed again."""
    shard = shard_of(spec.tp_group, rows=len(weight), vocab_size=spec.vocab_size)
    chunks = _Chunks(kernels_of(spec.impl), x, weight, labels, inv_temperature, spec, shard)
    grads = _Gradients(chunks, need_hidden=need_hidden, need_weight=need_weight)
    for part, logits in chunks:
        grads.add(part, logits, slopes[part])
    grads.finish()
    return grads.hidden, grads.weight


class _Chunks:
    """Iterates over (rows, their logits), in one buffer."""

    def __init__(
        self,
        kernels: ModuleType,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        inv_temperature: Tensor,
        spec: HeadSpec,
        shard: VocabShard,
    ) -> None:
        self.kernels, self.x, self.weight, self.shard = kernels, x, weight, shard
        self.labels, self.inv_temperature = shard.local_labels(labels), inv_temperature.contiguous()
        self.rules = {"softcap": spec.softcap, "num_valid": shard.num_valid}
        self.rows = kernels.chunk_rows(len(x), len(weight))

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        count = len(self.x)
        buffer = self.inv_temperature.new_empty(min(self.rows, count), len(self.weight))
        for start in range(0, count, self.rows):
            part = slice(start, min(start + self.rows, count))
            yield part, self.kernels.matmul_logits(self.x[part], self.weight, buffer[: part.stop - start])

    def stats(self, part: slice, logits: Tensor) -> Tensor:
        """[C, 5] over the whole vocabulary."""
        own = self.kernels.row_stats(logits, self.labels[part], self.inv_temperature[part], **self.rules)
        return merge_over_ranks(own, self.shard)


class _Gradients:
    """Turns slopes of a chunk into its share of the gradients, while its logits are there."""

    def __init__(
        self, chunks: _Chunks, *, need_hidden: bool, need_weight: bool, grad_weight: Tensor | None = None
    ) -> None:
        x, weight = chunks.x, chunks.weight
        self.chunks, self.need_hidden, self.need_weight = chunks, need_hidden, need_weight
        self.wanted = need_hidden or need_weight
        self.hidden = x.new_empty(x.shape if need_hidden else (len(x), 0))
        self.first = grad_weight is None
        if grad_weight is None:
            wide = torch.promote_types(weight.dtype, torch.float32)
            grad_weight = weight.new_empty(weight.shape if need_weight else 0, dtype=wide)
        self.weight = grad_weight
        self.dtype = chunks.kernels.grad_dtype(x.dtype)
        self.pending: list[dist.Work] = []
        self.buffer: Tensor | None = None

    def add(self, part: slice, logits: Tensor, slopes: Tensor) -> None:
        """Overwrites `logits` where the kernels work in place."""
        if not self.wanted:
            return
        chunks, kernels = self.chunks, self.chunks.kernels
        out = logits
        if self.dtype != logits.dtype:
            if self.buffer is None:
                self.buffer = logits.new_empty(logits.shape, dtype=self.dtype)
            out = self.buffer[: len(logits)]
        inv_temperature = chunks.inv_temperature[part]
        dlogits = kernels.row_grad(logits, chunks.labels[part], inv_temperature, slopes, out=out, **chunks.rules)
        if self.need_hidden:
            kernels.hidden_grad(dlogits, chunks.weight, out=self.hidden[part])
            work = reduce_hidden_grad(self.hidden[part], chunks.shard)  # overlaps with the next product
            self.pending += [] if work is None else [work]
        if self.need_weight:
            kernels.accumulate_weight_grad(dlogits, chunks.x[part], self.weight, first=self.first)
            self.first = False

    def finish(self) -> None:
        """Waits for the other ranks; without any row the gradient of the weight is zero."""
        for work in self.pending:
            work.wait()
        if self.first and self.need_weight:
            self.weight.zero_()


def _loss_and_slopes(
    summary: Tensor, rows: dict[str, Tensor], spec: HeadSpec, *, with_slopes: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(weighted sum of token_loss, row_stats.slopes [C, 5], stats) of one chunk from its statistics [C, 5]."""
    outputs = (row_stats.logprobs(summary), row_stats.entropy(summary), row_stats.log_normalizer(summary))
    columns: dict[str, Any] = {**rows, **spec.rules}
    token_weights = columns.pop("token_weights")
    if not with_slopes:
        losses, stats = token_loss(outputs[0], entropy=outputs[1], log_normalizer=outputs[2], **columns)
        return (losses * token_weights).sum(), summary, stats
    with torch.inference_mode(False), _autograd():
        leaves = [output.clone().requires_grad_() for output in outputs]
        losses, stats = token_loss(leaves[0], entropy=leaves[1], log_normalizer=leaves[2], **columns)
        total = (losses * token_weights).sum()
        found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return total.detach(), row_stats.slopes(summary, *found), stats


class _autograd:
    """Autograd inside the implementation of a torch.library operator, where the dispatcher has switched it off."""

    def __enter__(self) -> None:
        included, excluded = (
            torch._C._dispatch_tls_local_include_set(),
            torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined),
        )
        self.dispatch = torch._C._ForceDispatchKeyGuard(included, excluded)
        self.dispatch.__enter__()
        self.grad = torch.enable_grad()
        self.grad.__enter__()

    def __exit__(self, *error: object) -> None:
        self.grad.__exit__(*error)
        self.dispatch.__exit__(*error)


def _joined(stats: list[dict[str, Tensor]], loss: Tensor) -> list[Tensor]:
    """Statistics of all chunks, in the order of LossOutputs; empty ones without a chunk."""
    names = LossOutputs._fields[3:]
    if not stats:
        return [loss.new_empty(0, dtype=torch.bool if name == "clipped" else loss.dtype) for name in names]
    return [torch.cat([chunk[name] for chunk in stats]) for name in names]
