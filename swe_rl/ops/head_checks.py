"""Refuses what the head cannot take, in one line that names the argument and the cure. Nothing here waits for a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_head(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, softcap: float, vocab_size: int | None, tp_size: int
) -> int:
    """Columns of all ranks without padding: vocab_size, or where it is None all. No rows of hidden are fine.

    Raises ValueError.
    """
    for name, matrix in (("hidden", hidden), ("weight", weight)):
        if matrix.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {matrix.dtype}: use bfloat16, float16, float32 or float64")
        if matrix.ndim != 2 or matrix.shape[1] == 0:
            raise ValueError(f"{name} has shape {list(matrix.shape)}: it must be a matrix with at least one feature")
        if not matrix.is_contiguous():
            raise ValueError(f"{name} is strided: pass {name}.contiguous()")
    if len(weight) == 0:
        raise ValueError("weight is empty: it needs a row for every token of the vocabulary")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight is {weight.dtype}: cast one of them")
    if hidden.device != weight.device:
        raise ValueError(f"hidden is on {hidden.device} and weight on {weight.device}: move one of them")
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden has {hidden.shape[1]} features and weight {weight.shape[1]}: they must agree")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be positive, or 0 for none")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels has dtype {labels.dtype}: use int64")
    _check_beside("labels", labels, hidden)
    num_rows = tp_size * len(weight)
    if vocab_size is None:
        return num_rows
    if not isinstance(vocab_size, int) or not 0 < vocab_size <= num_rows:
        raise ValueError(f"vocab_size={vocab_size} must be an integer between 1 and the {num_rows} rows of weight")
    return vocab_size


def _check_beside(name: str, column: Tensor, hidden: Tensor) -> None:
    if column.shape != (len(hidden),):
        raise ValueError(f"{name} has shape {list(column.shape)}, hidden has {len(hidden)} rows: they must agree")
    if column.device != hidden.device:
        raise ValueError(f"{name} is on {column.device} and hidden on {hidden.device}: move one of them")


def check_columns(columns: Mapping[str, Any], hidden: Tensor) -> None:
    """Per-token tensors beside hidden [T, H]; loss_mask must be bool."""
    for name, column in columns.items():
        if not isinstance(column, Tensor):
            raise ValueError(f"{name} is a {type(column).__name__}: pass a tensor")
        _check_beside(name, column, hidden)
        if (column.dtype == torch.bool) != (name == "loss_mask") or column.is_complex():
            raise ValueError(f"{name} has dtype {column.dtype}: loss_mask is bool, all other columns are real numbers")


def check_trained_rows(trained_rows: Tensor, loss_mask: Tensor) -> None:
    """Raises ValueError unless they are those of loss_mask; on a GPU only their form is looked at."""
    if trained_rows.dtype != torch.int64 or trained_rows.ndim != 1:
        raise ValueError(
            f"trained_rows is {trained_rows.dtype} {list(trained_rows.shape)}: pass loss_mask.nonzero()[:, 0]"
        )
    if _readable(loss_mask) and not torch.equal(trained_rows, loss_mask.nonzero()[:, 0]):
        raise ValueError("trained_rows are not the rows of loss_mask: pass loss_mask.nonzero()[:, 0]")


def check_grad_weight_into(grad_weight_into: Tensor, weight: Tensor) -> None:
    """It takes the sum of [V, H] products in place."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    if grad_weight_into.shape != weight.shape or grad_weight_into.dtype != wide:
        found = f"{grad_weight_into.dtype} {list(grad_weight_into.shape)}"
        raise ValueError(f"grad_weight_into is {found}: it must be {wide} {list(weight.shape)}")
    if not grad_weight_into.is_contiguous() or grad_weight_into.device != weight.device:
        raise ValueError(f"grad_weight_into must be contiguous and on {weight.device}, as weight")


def check_label_range(labels: Tensor, vocab_size: int) -> None:
    """Of trained rows only, as masked slots may hold anything. On a GPU the check fails later, without a wait here."""
    _check_values("labels", labels, (labels >= 0) & (labels < vocab_size), f"in [0, {vocab_size})")


def check_temperature_range(temperatures: Tensor) -> None:
    """As check_label_range, for temperatures of trained rows."""
    _check_values("temperature", temperatures, temperatures > 0, "above 0")


def _check_values(name: str, values: Tensor, fine: Tensor, wanted: str) -> None:
    if values.is_cuda:
        torch._assert_async(fine.all(), f"{name}: that of a trained row is not {wanted}")
    elif _readable(values) and not bool(fine.all()):
        raise ValueError(f"{name}: {values[~fine][0].item()} of a trained row is not {wanted}")


def _readable(tensor: Tensor) -> bool:
    """Whether the host may look at values: free of waiting, and not while torch.compile traces."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_temperature(temperature: float | Tensor, hidden: Tensor) -> None:
    """A number above 0, or [T]."""
    if isinstance(temperature, Tensor):
        check_columns({"temperature": temperature}, hidden)
    elif not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0")
