"""What a call of the head is, beside its tensors: one immutable record that fits through torch.library as a string."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from swe_rl.ops.token_loss import LossRules


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """`columns` names the per-row tensors that follow `labels`; `rules` are those of token_loss."""

    impl: str
    vocab_size: int
    softcap: float = 0.0
    tp_group: str = ""  # name of the process group over which the vocabulary is split; "": not split
    sequence_parallel: bool = False  # ranks of that group hold different rows
    consume: bool = False  # backward may overwrite the gradient that the forward pass made: the caller hides it
    columns: tuple[str, ...] = ()
    rules: LossRules = field(default_factory=LossRules)


@torch.compiler.assume_constant_result
def encode_spec(**values: Any) -> str:
    """The fields of a HeadSpec as text, the same for equal records. A constant to torch.compile."""
    return json.dumps(asdict(HeadSpec(**values)), sort_keys=True)


@functools.lru_cache(maxsize=256)
def decode_spec(text: str) -> HeadSpec:
    """Inverse of encode_spec."""
    values: dict[str, Any] = json.loads(text)
    return HeadSpec(**{**values, "columns": tuple(values["columns"])})
