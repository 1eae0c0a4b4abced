"""Lists of numbers as tensors. torch.tensor looks at every item twice and asks for its type; an array does not, which
is five times as fast: a step of long samples has millions of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

CODES = {torch.int64: "q", torch.int32: "i", torch.float32: "f"}  # of the module array; C has them in these sizes


def column(parts: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """The lists behind each other, [sum of lengths]: int64, int32, float32 or bool, rounded as torch does."""
    if dtype == torch.bool:
        flags = bytearray().join(bytes(part) for part in parts)  # type: ignore[arg-type]  # bools are ints
        return torch.frombuffer(flags, dtype=dtype) if flags else torch.empty(0, dtype=dtype)
    code = CODES[dtype]
    values = array(code)
    for part in parts:
        values += array(code, part)  # type: ignore[arg-type]  # items are of the code's type
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)


def indices(flags: Sequence[bool]) -> list[int]:
    """Indices of what is True."""
    found: list[int] = column([flags], torch.bool).nonzero()[:, 0].tolist()
    return found
