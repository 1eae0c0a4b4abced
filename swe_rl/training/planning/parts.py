"""Bytes by component, each with the product that it came from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

BYTES = {"bfloat16": 2, "float32": 4}
OPTIMIZER_BYTES = {"adamw": 8, "muon": 4}  # fp32 moments per parameter: two, or the momentum of matrices


class Part(NamedTuple):
    name: str  # parameters | gradients | optimizer | activations | keys | logits | buffers
    num_bytes: int
    how: str  # the arithmetic, for people


def total(parts: Iterable[Part]) -> int:
    return sum(part.num_bytes for part in parts)


def billions(number: float) -> str:
    """A count for people: 32.8e9 -> "32.76 G"."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {letter}"
    return f"{number:.0f}"
