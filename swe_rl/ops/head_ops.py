"""The head as operators of torch.library, so that torch.compile and autograd see opaque calls with known shapes.

swe_rl::head_policy_loss       loss and its gradients at once; backward only scales them
swe_rl::head_policy_loss_into  the same, the gradient of the weight added to a buffer of the caller's; the upstream
                               gradient must be 1, as nothing scales that buffer later
swe_rl::head_logprob           statistics of rows; its backward computes the logits again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swe_rl.ops import chunked_head, row_stats
from swe_rl.ops.head_spec import decode_spec

FIRST_ORDER = "the head has first derivatives only: differentiate it without create_graph"
ONCE = "the gradient of weight is already in grad_weight_into: differentiate the loss once"
UNSCALED = "grad_weight_into holds an unscaled gradient: fold every scale into token_weights, then loss.backward()"
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("swe_rl::head_policy_loss", mutates_args=())
def head_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    labels: Tensor,
    columns: Sequence[Tensor],
    spec: str,
    need_hidden: bool,
    need_weight: bool,
) -> Outputs:
    """hidden [T, H]; rows [M] i64 are the trained ones; labels and columns [M]. See chunked_head.LossOutputs."""
    x = hidden.detach().index_select(0, rows)
    return tuple(  # type: ignore[return-value]
        chunked_head.policy_loss(
            x,
            weight.detach(),
            labels,
            list(columns),
            decode_spec(spec),
            need_hidden=need_hidden,
            need_weight=need_weight,
        )
    )


@torch.library.custom_op("swe_rl::head_policy_loss_into", mutates_args=("grad_weight",))
def head_policy_loss_into(
    hidden: Tensor,
    weight: Tensor,
    grad_weight: Tensor,
    rows: Tensor,
    labels: Tensor,
    columns: Sequence[Tensor],
    spec: str,
    need_hidden: bool,
) -> Outputs:
    """As head_policy_loss, but adds to grad_weight [V, H] fp32 and returns an empty gradient of the weight."""
    x = hidden.detach().index_select(0, rows)
    outputs = chunked_head.policy_loss(
        x,
        weight.detach(),
        labels,
        list(columns),
        decode_spec(spec),
        need_hidden=need_hidden,
        need_weight=True,
        grad_weight=grad_weight,
    )
    return tuple(outputs._replace(grad_weight=grad_weight.new_empty(0)))  # type: ignore[return-value]


def _fake_outputs(hidden: Tensor, weight: Tensor, rows: Tensor, *, need_hidden: bool, need_weight: bool) -> Outputs:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    count = rows.shape[0]
    loss = hidden.new_empty((), dtype=wide)
    grad_hidden = hidden.new_empty(count, hidden.shape[1] if need_hidden else 0)
    grad_weight = weight.new_empty(weight.shape if need_weight else 0, dtype=wide)
    logprobs, entropy, ratio = (hidden.new_empty(count, dtype=wide) for _ in range(3))
    return loss, grad_hidden, grad_weight, logprobs, entropy, ratio, hidden.new_empty(count, dtype=torch.bool)


@head_policy_loss.register_fake
def _(hidden, weight, rows, labels, columns, spec, need_hidden, need_weight):  # type: ignore[no-untyped-def]
    return _fake_outputs(hidden, weight, rows, need_hidden=need_hidden, need_weight=need_weight)


@head_policy_loss_into.register_fake
def _(hidden, weight, grad_weight, rows, labels, columns, spec, need_hidden):  # type: ignore[no-untyped-def]
    return _fake_outputs(hidden, weight, rows, need_hidden=need_hidden, need_weight=False)


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    hidden, weight, rows = inputs[0], inputs[1], inputs[2]
    ctx.save_for_backward(rows, output[1], output[2])
    ctx.num_rows, ctx.weight_dtype, ctx.num_columns = len(hidden), weight.dtype, len(inputs[4])
    ctx.needs, ctx.consume = (inputs[6], inputs[7]), decode_spec(inputs[5]).consume
    ctx.set_materialize_grads(False)


def _scatter(grad_rows: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[M, H] gradients of the trained rows -> [T, H]; rows are distinct, so the order of writing does not matter."""
    return grad_rows.new_zeros(num_rows, grad_rows.shape[1]).index_copy_(0, rows, grad_rows)


def _scaled(grad_weight: Tensor, factor: Tensor, *, in_place: bool) -> Tensor:
    """The buffer is as large as the weight: scaled in place where nobody else sees it; autograd's version check then
    refuses a second backward pass. A tracer (its tensors are a subclass) cannot follow such writes."""
    return grad_weight.mul_(factor) if in_place and type(grad_weight) is Tensor else grad_weight * factor


def _loss_backward(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    rows, grad_rows, grad_weight = ctx.saved_tensors
    nothing = [None] * ctx.num_columns
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(FIRST_ORDER)
    if grad_loss is None:
        return None, None, None, None, nothing, None, None, None
    need_hidden, need_weight = ctx.needs
    hidden = weight = None
    if need_hidden:
        scaled = grad_rows * grad_loss.reshape(1, 1)  # wide: a loss scale of 65536 is no fp16 number
        hidden = _scatter(scaled.to(grad_rows.dtype), rows, ctx.num_rows)
    if need_weight:
        weight = _scaled(grad_weight, grad_loss, in_place=ctx.consume).to(ctx.weight_dtype)
    return hidden, weight, None, None, nothing, None, None, None


class LossInto(torch.autograd.Function):
    """head_policy_loss_into with a gradient; torch.library differentiates functional operators only."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        grad_weight: Tensor,
        rows: Tensor,
        labels: Tensor,
        columns: Sequence[Tensor],
        spec: str,
    ) -> Outputs:
        need_hidden = ctx.needs_input_grad[0]
        out = head_policy_loss_into(hidden, weight, grad_weight, rows, labels, columns, spec, need_hidden)
        ctx.save_for_backward(rows, out[1])
        ctx.num_rows, ctx.need_hidden, ctx.spent = len(hidden), need_hidden, False
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, grad_rows = ctx.saved_tensors
        hidden = None
        if ctx.spent:
            raise RuntimeError(ONCE)
        ctx.spent = True
        if grad_loss is not None:
            torch._assert_async(grad_loss == 1, UNSCALED)
            hidden = _scatter(grad_rows, rows, ctx.num_rows) if ctx.need_hidden else None
        return hidden, None, None, None, None, None, None


head_policy_loss.register_autograd(_loss_backward, setup_context=_save_loss)


@torch.library.custom_op("swe_rl::head_logprob", mutates_args=())
def head_logprob(
    hidden: Tensor, weight: Tensor, labels: Tensor, inv_temperature: Tensor, spec: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs [T], entropy [T], statistics [T, 5]) of all rows."""
    stats = chunked_head.logprobs(hidden.detach(), weight.detach(), labels, inv_temperature, decode_spec(spec))
    return row_stats.logprobs(stats), row_stats.entropy(stats), stats


@head_logprob.register_fake
def _(hidden, weight, labels, inv_temperature, spec):  # type: ignore[no-untyped-def]
    count = len(labels)
    stats = inv_temperature.new_empty(count, row_stats.NUM_STATS)
    return inv_temperature.new_empty(count), inv_temperature.new_empty(count), stats


@torch.library.custom_op("swe_rl::head_logprob_backward", mutates_args=())
def head_logprob_backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    inv_temperature: Tensor,
    slopes: Tensor,
    spec: str,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """(grad_hidden [T, H], grad_weight [V, H] fp32), each empty if not needed."""
    return chunked_head.logprobs_backward(
        hidden,
        weight,
        labels,
        inv_temperature,
        slopes,
        decode_spec(spec),
        need_hidden=need_hidden,
        need_weight=need_weight,
    )


@head_logprob_backward.register_fake
def _(hidden, weight, labels, inv_temperature, slopes, spec, need_hidden, need_weight):  # type: ignore[no-untyped-def]
    grads = _fake_outputs(hidden, weight, labels, need_hidden=need_hidden, need_weight=need_weight)
    return grads[1], grads[2]


def _save_logprob(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, labels, inv_temperature, ctx.spec = inputs
    ctx.save_for_backward(hidden, weight, labels, inv_temperature, output[2])
    ctx.set_materialize_grads(False)


def _logprob_backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Any) -> tuple[Any, ...]:
    hidden, weight, labels, inv_temperature, stats = ctx.saved_tensors
    nothing = torch.zeros_like(inv_temperature)
    d_logprobs = nothing if grad_logprobs is None else grad_logprobs
    slopes = row_stats.slopes(stats, d_logprobs, nothing if grad_entropy is None else grad_entropy, nothing)
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    grads = head_logprob_backward(hidden, weight, labels, inv_temperature, slopes, ctx.spec, need_hidden, need_weight)
    grad_weight = grads[1].to(weight.dtype) if need_weight else None
    return grads[0] if need_hidden else None, grad_weight, None, None, None


head_logprob.register_autograd(_logprob_backward, setup_context=_save_logprob)
