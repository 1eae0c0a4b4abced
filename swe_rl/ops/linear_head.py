"""The public head operations and the choice of who computes them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import chunked_head, head_ops, reference
from swe_rl.ops.head_checks import (
    check_columns,
    check_grad_weight_into,
    check_head,
    check_label_range,
    check_temperature,
    check_temperature_range,
    check_trained_rows,
)
from swe_rl.ops.head_spec import encode_spec
from swe_rl.ops.token_loss import COLUMNS, LossRules, LossTerms, complete_rules

IMPLS = ("auto", "reference", "cpu", "triton")
log = logging.getLogger(__name__)


@functools.cache
def _log_choice(op: str, impl: str, reason: str) -> None:
    """Once per operation and choice: what runs, and why."""
    log.info("%s: impl=%s (%s)", op, impl, reason)


@torch.compiler.assume_constant_result
def pick_impl(op: str, impl: str, device: str, dtype: torch.dtype, split: bool) -> str:
    """Name of the implementation to use. Raises ConfigError for a name that is unknown or cannot run here.

    auto takes the kernels made for the device; `split` tells that the vocabulary is split over ranks.
    """
    if impl not in IMPLS:
        raise ConfigError(f"impl={impl!r} is unknown: use one of {', '.join(IMPLS)}")
    if impl == "reference":
        if split:
            raise ConfigError("impl='reference' does not split the vocabulary over ranks: use impl='auto'")
        _log_choice(op, impl, "asked for")
        return impl
    wanted = impl if impl != "auto" else ("triton" if device == "cuda" else "cpu")
    usable, reason = chunked_head.usable(wanted, device=device, dtype=dtype)
    if usable:
        _log_choice(op, wanted, "asked for" if impl != "auto" else f"made for {device}")
        return wanted
    if impl != "auto" or split:
        raise ConfigError(f"impl={wanted!r} of {op} cannot run here: {reason}")
    _log_choice(op, "reference", f"{wanted} cannot run here: {reason}")
    return "reference"


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float = 0.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[label] and the entropy of each row; no [T, V] tensor.

    hidden [T, H] and weight [V, H] contiguous, of one of bf16, fp16, fp32, fp64; labels [T] i64 already shifted;
    temperature a number or [T]. softcap c > 0 puts c tanh(logits / c) in place of the logits. With `tp_group` weight is
    this rank's equal share of the rows, and hidden is the same on all ranks, as are results and the gradient of hidden.
    vocab_size counts the rows of all ranks that are no padding (default: all).
    Returns (logprobs [T], entropy [T]), natural, fp32 (fp64 for fp64 inputs), differentiable. Raises ConfigError for a
    bad `impl`, ValueError for tensors that do not fit.
    """
    tp_size = 1 if tp_group is None else dist.get_world_size(tp_group)
    vocab = check_head(hidden, weight, labels, softcap=softcap, vocab_size=vocab_size, tp_size=tp_size)
    check_temperature(temperature, hidden)
    check_label_range(labels, vocab)
    chosen = pick_impl("linear_logprob", impl, hidden.device.type, hidden.dtype, tp_group is not None)
    scale = _temperatures(temperature, hidden)
    check_temperature_range(scale)
    if chosen == "reference":
        logprobs, entropy, _ = reference.outputs(
            hidden, weight, labels, temperature=scale, softcap=softcap, vocab_size=vocab
        )
        return logprobs, entropy
    spec = encode_spec(impl=chosen, vocab_size=vocab, softcap=softcap, tp_group=_name(tp_group))
    logprobs, entropy, _ = head_ops.head_logprob(hidden, weight, labels, scale.reciprocal(), spec)
    return logprobs, entropy


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    temperature: float | Tensor = 1.0,
    softcap: float = 0.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    trained_rows: Tensor | None = None,
    grad_weight_into: Tensor | None = None,
    impl: str = "auto",
    **terms: Unpack[LossTerms],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over trained t of token_weights[t] * loss[t], with the maths of ops.token_loss.

    hidden, weight, labels, softcap, vocab_size, tp_group as in linear_logprob, everything else [T] aligned to `labels`;
    loss_mask bool selects the T_trained rows first, so that masked slots may hold anything. token_weights fp32 hold
    every normaliser. terms: old_logprobs, rollout_logprobs, sequence_coeff, ref_logprobs ([T] or None) and the rules
    of token_loss.
    sequence_parallel: every rank of tp_group has its own tokens; the loss is over all of them, on all ranks.
    trained_rows: loss_mask.nonzero()[:, 0] where the host knows it already; spares a GPU one synchronisation.
    grad_weight_into [V, H] fp32: the gradient of weight is added there at once, and weight gets none. The loss must
    then be differentiated with an upstream gradient of 1.
    Gradients are made with the loss; backward scales them, once. Returns (loss scalar, stats: detached [T_trained]
    logprobs, entropy, ratio, clipped of this rank's tokens). Raises ConfigError for a bad `impl`, ValueError for
    tensors or rules that do not fit.
    """
    rules = _rules(terms)
    columns: dict[str, Any] = {name: value for name, value in terms.items() if name in COLUMNS and value is not None}
    columns |= {"advantages": advantages, "token_weights": token_weights}
    tp_size = 1 if tp_group is None else dist.get_world_size(tp_group)
    vocab = check_head(hidden, weight, labels, softcap=softcap, vocab_size=vocab_size, tp_size=tp_size)
    check_columns({**columns, "loss_mask": loss_mask}, hidden)
    check_temperature(temperature, hidden)
    if grad_weight_into is not None:
        check_grad_weight_into(grad_weight_into, weight)
    if trained_rows is not None:
        check_trained_rows(trained_rows, loss_mask)
    if sequence_parallel and tp_group is None:
        raise ValueError("sequence_parallel needs tp_group")
    chosen = pick_impl("linear_policy_loss", impl, hidden.device.type, hidden.dtype, tp_group is not None)
    rows = loss_mask.nonzero(as_tuple=True)[0] if trained_rows is None else trained_rows
    wide = torch.promote_types(hidden.dtype, torch.float32)
    selected: dict[str, Any] = {
        name: column.detach().to(wide).index_select(0, rows) for name, column in columns.items()
    }
    labels = labels.index_select(0, rows)
    check_label_range(labels, vocab)
    scale = _temperatures(temperature, hidden).index_select(0, rows)
    check_temperature_range(scale)
    if chosen == "reference":
        if grad_weight_into is not None:
            raise ConfigError("impl='reference' has no grad_weight_into: use impl='auto'")
        options: dict[str, Any] = {"temperature": scale, "softcap": softcap, "vocab_size": vocab}
        return reference.policy_loss(hidden.index_select(0, rows), weight, labels, **options, **selected, **rules)
    selected["inv_temperature"] = scale.reciprocal()
    spec = encode_spec(
        impl=chosen,
        vocab_size=vocab,
        softcap=softcap,
        tp_group=_name(tp_group),
        sequence_parallel=sequence_parallel,
        consume=True,
        columns=tuple(selected),
        rules=rules,
    )
    return _call(hidden, weight, rows, labels, list(selected.values()), spec, grad_weight_into)


def _call(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    labels: Tensor,
    columns: list[Tensor],
    spec: str,
    grad_weight_into: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    need_hidden, need_weight = (t.requires_grad and torch.is_grad_enabled() for t in (hidden, weight))
    if grad_weight_into is not None and need_weight:
        out = head_ops.LossInto.apply(hidden, weight, grad_weight_into, rows, labels, columns, spec)
    else:
        out = head_ops.head_policy_loss(hidden, weight, rows, labels, columns, spec, need_hidden, need_weight)
    names = chunked_head.LossOutputs._fields[3:]
    return out[0], {name: value.detach() for name, value in zip(names, out[3:], strict=True)}


def _rules(terms: Mapping[str, Any]) -> LossRules:
    """The rules among the terms, complete and checked."""
    rules: Any = {name: value for name, value in terms.items() if name not in COLUMNS}
    has_old, has_rollout, _, has_ref = (terms.get(name) is not None for name in COLUMNS)
    return complete_rules(rules, has_old=has_old, has_rollout=has_rollout, has_ref=has_ref)


def _temperatures(temperature: float | Tensor, hidden: Tensor) -> Tensor:
    """[T] in the dtype of the sums."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if isinstance(temperature, Tensor):
        return temperature.to(wide)
    return torch.full((len(hidden),), temperature, dtype=wide, device=hidden.device)


def _name(group: dist.ProcessGroup | None) -> str:
    return "" if group is None else group.group_name
