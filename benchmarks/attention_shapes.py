"""What the attention benchmarks compute: masks as they come up in training, and one set of inputs per case."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DOCUMENT_SHARES = (0.31, 0.04, 0.22, 0.11, 0.02, 0.19, 0.08, 0.03)  # of the tokens: uneven, as trajectories are
ANSWERS = 8  # continuations of one prompt in the tree, each with a part that two of them share
MASKS = ("document", "documents", "tree")


@dataclass(frozen=True)
class AttentionCase:
    """mode "forward" (no gradient) or "forward_backward" (gradients of q, k and v)."""

    num_tokens: int
    heads: int = 8
    key_heads: int = 2
    head_dim: int = 64
    mask: str = "document"
    mode: str = "forward_backward"
    dtype: str = "float32"
    device: str = "cpu"

    def __str__(self) -> str:
        sizes = f"T={self.num_tokens} heads={self.heads}/{self.key_heads} D={self.head_dim} {self.mask}"
        return f"{sizes} {self.dtype} {self.device} {self.mode}"

    @property
    def columns(self) -> dict[str, object]:
        """As in the CSV files."""
        return {
            "kernel": "attention",
            "device": self.device,
            "dtype": self.dtype,
            "T": self.num_tokens,
            "Hq": self.heads,
            "Hkv": self.key_heads,
            "D": self.head_dim,
            "mask": self.mask,
            "mode": self.mode,
        }

    def flops(self, pairs: float) -> float:
        """Of `pairs` visible (query, key) pairs: two products forward, five more backward, none counted twice."""
        forward = 4.0 * pairs * self.heads * self.head_dim
        return forward if self.mode == "forward" else 3.5 * forward


@dataclass
class AttentionInputs:
    """q, k and v are leaves; `lengths` are those of the documents, None for a tree."""

    case: AttentionCase
    q: Tensor  # [T, Hq, D]
    k: Tensor  # [T, Hkv, D]
    v: Tensor  # [T, Hkv, D]
    grad: Tensor  # [T, Hq, D], of the output
    kv_end: Tensor  # [T] int32
    lengths: list[int] | None
    pairs: float  # visible (query, key) pairs of one head

    def clear_gradients(self) -> None:
        """Of the leaves, as before a step."""
        self.q.grad = self.k.grad = self.v.grad = None


def make_inputs(case: AttentionCase) -> AttentionInputs:
    """The same numbers in every process."""
    from swe_rl.ops.attention_cost import visible_pairs
    from swe_rl.ops.attention_mask import runs

    lengths = {"document": [case.num_tokens], "documents": _lengths(case.num_tokens), "tree": None}[case.mask]
    kv_end = _tree(case.num_tokens) if lengths is None else _documents(lengths)
    make = torch.Generator().manual_seed(0)
    shapes = [(case.num_tokens, h, case.head_dim) for h in (case.heads, case.key_heads, case.key_heads, case.heads)]
    tensors = [torch.randn(shape, generator=make).to(case.device, getattr(torch, case.dtype)) for shape in shapes]
    for leaf in tensors[:3]:
        leaf.requires_grad_(case.mode == "forward_backward")
    return AttentionInputs(case, *tensors, kv_end.to(case.device), lengths, visible_pairs(runs(kv_end)))


def _lengths(tokens: int) -> list[int]:
    found = [max(round(share * tokens), 1) for share in DOCUMENT_SHARES[1:]]
    return [tokens - sum(found), *found]


def _documents(lengths: list[int]) -> Tensor:
    ends: list[int] = []
    for length in lengths:
        ends += [len(ends) + length] * length
    return torch.tensor(ends, dtype=torch.int32)


def _tree(tokens: int) -> Tensor:
    """A prompt of a quarter of the tokens; pairs of answers that share their first half."""
    prompt, branch = tokens // 4, (tokens - tokens // 4) // (ANSWERS // 2)
    ends = [tokens] * (tokens - branch * (ANSWERS // 2))
    assert len(ends) >= prompt
    for _ in range(ANSWERS // 2):
        start = len(ends)
        trunk, leaf = branch // 3, (branch - branch // 3) // 2
        ends += [start + branch] * (branch - 2 * leaf)
        assert branch - 2 * leaf >= trunk
        for _ in range(2):
            ends += [len(ends) + leaf] * leaf
    return torch.tensor(ends, dtype=torch.int32)
