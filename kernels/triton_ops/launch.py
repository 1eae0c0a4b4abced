"""What the launchers share: fixed configurations per architecture, and the device to launch on."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NUM_SMS = 132  # of an H100 or H200; only a target for how finely work is split, never read from the device


@dataclass(frozen=True)
class KernelConfig:
    """constexpr arguments and compiler options of one kernel on one architecture; never tuned on the data's sizes."""

    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 1
    # Off: one rounding per operation, the same numbers in every kernel, in the interpreter and for every Triton.
    options: dict[str, Any] = field(default_factory=lambda: {"enable_fp_fusion": False})

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of the launch."""
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages, **self.options}


def architecture(tensor: Tensor) -> int:
    """Compute capability as Triton counts it: 80, 90, 100; 90 for the interpreter's CPU tensors."""
    if tensor.device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return major * 10 + minor


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's device the current one: Triton launches on the current device and its stream."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()


def cdiv(numerator: int, denominator: int) -> int:
    """Quotient rounded up."""
    return -(-numerator // denominator)
