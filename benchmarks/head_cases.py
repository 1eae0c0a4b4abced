"""What the head benchmarks compute: one set of inputs per case, made the same way in every process.

Letters: B sequences of equal length, T tokens in all, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TURN = 40  # tokens of one turn: context first, then what the policy wrote
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class HeadCase:
    """mode "forward_backward": policy loss, gradients of hidden and weight. "scoring": logprobs of the trained rows."""

    num_tokens: int
    hidden_size: int
    vocab_size: int
    trained_fraction: float
    mode: str = "forward_backward"
    dtype: str = "float32"
    device: str = "cpu"
    num_sequences: int = 4

    def __str__(self) -> str:
        sizes = f"T={self.num_tokens} H={self.hidden_size} V={self.vocab_size} f={self.trained_fraction:g}"
        return f"{sizes} {self.dtype} {self.device} {self.mode}"

    @property
    def columns(self) -> dict[str, object]:
        """As in the CSV files."""
        return {
            "kernel": "policy_head",
            "device": self.device,
            "dtype": self.dtype,
            "T": self.num_tokens,
            "H": self.hidden_size,
            "V": self.vocab_size,
            "trained_fraction": self.trained_fraction,
            "mode": self.mode,
        }

    @property
    def logits_bytes(self) -> int:
        """fp32 logits of all tokens."""
        return 4 * self.num_tokens * self.vocab_size


@dataclass
class HeadInputs:
    """hidden and weight are leaves; everything else is constant. Masked rows hold ordinary numbers."""

    case: HeadCase
    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    labels: Tensor  # [T] i64
    loss_mask: Tensor  # [T] bool
    advantages: Tensor  # [T] fp32, the same over a sequence
    old_logprobs: Tensor  # [T] fp32
    token_weights: Tensor  # [T] fp32: 1 / number of trained tokens
    main_grad: Tensor | None = None  # [V, H] fp32, made by the provider that uses it

    def clear_gradients(self) -> None:
        """Of both leaves, as before a step."""
        self.hidden.grad = self.weight.grad = None

    @property
    def sequence_advantages(self) -> Tensor:
        """[B], for providers that know only those."""
        return self.advantages.view(self.case.num_sequences, -1)[:, 0].contiguous()

    def per_sequence(self, values: Tensor) -> Tensor:
        """[T, ...] as [B, T/B, ...]."""
        return values.view(self.case.num_sequences, -1, *values.shape[1:])


def make_inputs(case: HeadCase) -> HeadInputs:
    """Logits have a standard deviation of 2; old logprobs lie around the current ones, so that some tokens clip."""
    if case.num_tokens % case.num_sequences:
        raise ValueError(f"{case.num_tokens} tokens do not divide into {case.num_sequences} sequences")
    make = torch.Generator(device=case.device).manual_seed(0)
    options = {"generator": make, "device": case.device}
    dtype = getattr(torch, case.dtype)
    tokens = case.num_tokens
    hidden = torch.randn(tokens, case.hidden_size, **options).to(dtype)
    weight = torch.randn(case.vocab_size, case.hidden_size, **options).mul_(2 * case.hidden_size**-0.5).to(dtype)
    labels = torch.randint(case.vocab_size, (tokens,), **options)
    place = torch.arange(tokens, device=case.device) % TURN
    loss_mask = place >= round(TURN * (1 - case.trained_fraction))
    advantages = torch.randn(case.num_sequences, **options).repeat_interleave(tokens // case.num_sequences)
    old_logprobs = _logprobs(hidden, weight, labels) + 0.2 * torch.randn(tokens, **options)
    token_weights = torch.full((tokens,), 1.0 / max(int(loss_mask.sum()), 1), device=case.device)
    leaves = [leaf.requires_grad_(case.mode == "forward_backward") for leaf in (hidden, weight)]
    return HeadInputs(case, *leaves, labels, loss_mask, advantages, old_logprobs, token_weights)


def _logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """[T], fp32, a few rows at a time: inputs must not need more memory than what is measured."""
    parts = []
    for start in range(0, len(hidden), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        logits = (hidden[part] @ weight.T).float()
        parts.append(logits.gather(1, labels[part, None])[:, 0] - torch.logsumexp(logits, dim=-1))
    return torch.cat(parts)
