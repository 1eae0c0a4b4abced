"""The head and its losses in fp64, from the papers' formulas on full matrices; inputs for the tests of this folder.

Nothing here calls the package. PPO is written by cases on the sign of the advantage, as in the papers' figures, the
package by a maximum; what agrees is then the mathematics and not a copied line.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

COLUMNS = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "sequence_coeff")

# Every rule, alone and combined: name -> (tensors given beside advantages and weights, rules).
RULES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "ppo": (("old_logprobs",), {"clip_low": 0.1, "clip_high": 0.3}),
    "ppo dual clip": (("old_logprobs",), {"dual_clip": 1.4}),
    "ppo once": ((), {}),
    "cispo": (("old_logprobs",), {"ratio_rule": "cispo", "clip_low": 0.3, "clip_high": 0.1}),
    "on policy": ((), {"ratio_rule": "on_policy"}),
    "cross entropy": ((), {"ratio_rule": "cross_entropy"}),
    "gspo": (("sequence_coeff",), {"ratio_rule": "on_policy"}),
    "tis": (("old_logprobs", "rollout_logprobs"), {"correction": "tis", "correction_cap": 1.1}),
    "tis once": (("rollout_logprobs",), {"ratio_rule": "on_policy", "correction": "tis", "correction_cap": 1.1}),
    "mask": (
        ("old_logprobs", "rollout_logprobs"),
        {"ratio_rule": "cispo", "correction": "mask", "correction_low": 0.8, "correction_cap": 1.3},
    ),
    "kl": (("old_logprobs", "ref_logprobs"), {"kl_coeff": 0.3}),
    "entropy": (("old_logprobs",), {"entropy_coeff": 0.2}),
    "z-loss": ((), {"z_loss_coeff": 0.01, "ratio_rule": "cross_entropy"}),
    "all": (
        COLUMNS,
        {"dual_clip": 1.5, "correction": "tis", "kl_coeff": 0.1, "entropy_coeff": 0.05, "z_loss_coeff": 0.01},
    ),
}


class Head(NamedTuple):
    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    labels: Tensor  # [T]


class Answer(NamedTuple):
    """What a head should return, in fp64."""

    loss: Tensor
    logprobs: Tensor  # [M], of trained rows
    entropy: Tensor
    ratio: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def make_head(
    rows: int, vocab: int, features: int, dtype: torch.dtype, *, offset: float = 0.0, seed: int = 0, spread: float = 1.0
) -> Head:
    """Random; `offset` is added to every logit, through a feature of its own. Odd rows have their likeliest label."""
    generator = torch.Generator().manual_seed(seed)
    hidden = spread * torch.randn(rows, features, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, features, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[1::2] = (hidden @ weight.T).argmax(dim=1)[1::2]
    if offset:
        hidden = torch.cat([hidden, torch.full((rows, 1), offset, dtype=torch.float64)], dim=1)
        weight = torch.cat([weight, torch.ones(vocab, 1, dtype=torch.float64)], dim=1)
    return Head(hidden.to(dtype), weight.to(dtype), labels)


def scaled_logits(
    hidden: Tensor,
    weight: Tensor,
    temperature: float | Tensor = 1.0,
    softcap: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    logits = hidden.double() @ weight.double()[:vocab_size].T
    if softcap:
        growth = torch.exp(2 * logits / softcap)
        logits = softcap * (growth - 1) / (growth + 1)
    return logits / (temperature[:, None].double() if isinstance(temperature, Tensor) else temperature)


def softmax_summary(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob of the label, entropy, log normaliser) of each row."""
    top = logits.detach().amax(dim=1, keepdim=True)
    weights = (logits - top).exp()
    normalizer = weights.sum(dim=1)
    log_normalizer = normalizer.log() + top[:, 0]
    mean = (weights * logits).sum(dim=1) / normalizer
    return logits[torch.arange(len(labels)), labels] - log_normalizer, log_normalizer - mean, log_normalizer


def make_columns(head: Head, *, fraction: float, seed: int = 3, **scaling: Any) -> dict[str, Tensor]:
    """All [T] tensors of a loss, in fp32; other policies lie around the head's own, so that every clip acts somewhere.

    fraction 0 trains no row, 1 all; in between at least one.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = len(head.hidden)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(rows, dtype=torch.float64).uniform_(low, high, generator=generator)

    masked_labels = head.labels.clamp(0, len(head.weight) - 1)
    logprobs, _, _ = softmax_summary(scaled_logits(head.hidden, head.weight, **scaling), masked_labels)
    mask = torch.rand(rows, generator=generator) < fraction
    if fraction:
        mask[rows // 2 :][:1] = True
    values = {"advantages": uniform(-1, 1), "token_weights": uniform(0.1, 1)}
    for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs"):
        values[name] = logprobs + uniform(-0.6, 0.6)
    values["sequence_coeff"] = uniform(0, 2)
    return {**{name: value.float() for name, value in values.items()}, "loss_mask": mask}


def policy_term(logprobs: Tensor, given: dict[str, Tensor], rules: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(loss, ratio) of a token before corrections."""
    advantage = given["advantages"]
    ratio = torch.exp(logprobs - given.get("old_logprobs", logprobs.detach()))
    low, high = 1 - rules.get("clip_low", 0.2), 1 + rules.get("clip_high", 0.28)
    rule = rules.get("ratio_rule", "ppo")
    if rule == "cross_entropy":
        return -logprobs, torch.ones_like(logprobs)
    if rule == "on_policy":
        return -advantage * ratio, ratio
    if rule == "cispo":
        return -advantage * ratio.detach().clamp(low, high) * logprobs, ratio
    good = torch.minimum(ratio, torch.full_like(ratio, high))  # a good action gains nothing beyond the clip
    bad = torch.maximum(ratio, torch.full_like(ratio, low))
    if rules.get("dual_clip"):
        bad = torch.minimum(bad, torch.full_like(ratio, rules["dual_clip"]))
    return -advantage * torch.where(advantage > 0, good, bad), ratio


def token_formula(
    summary: tuple[Tensor, Tensor, Tensor], given: dict[str, Tensor], rules: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(loss, ratio) of each trained token; `given` holds trained rows in fp64."""
    logprobs, entropy, log_normalizer = summary
    loss, ratio = policy_term(logprobs, given, rules)
    if "correction" in rules:
        mismatch = torch.exp(given.get("old_logprobs", logprobs).detach() - given["rollout_logprobs"])
        low = rules["correction_low"] if rules["correction"] == "mask" else 0.0
        cap = rules.get("correction_cap", 2.0)
        if rules["correction"] == "tis":
            mismatch = torch.minimum(mismatch, torch.full_like(mismatch, cap))
        loss = loss * mismatch * ((mismatch >= low) & (mismatch <= cap))
    loss = loss * given.get("sequence_coeff", 1.0)
    if rules.get("kl_coeff"):
        log_odds = given["ref_logprobs"] - logprobs
        loss = loss + rules["kl_coeff"] * (torch.exp(log_odds) - log_odds - 1)
    loss = loss - rules.get("entropy_coeff", 0.0) * entropy
    return loss + rules.get("z_loss_coeff", 0.0) * log_normalizer**2, ratio


def answer(head: Head, columns: dict[str, Tensor], rules: dict[str, Any], **scaling: Any) -> Answer:
    """Loss over trained rows and its gradients, by autograd of the formulas in fp64."""
    mask = columns["loss_mask"]
    hidden, weight = wide_leaves(head)
    logits = scaled_logits(hidden, weight, **scaling)[mask]
    summary = softmax_summary(logits, head.labels[mask])
    given = {name: column[mask].double() for name, column in columns.items() if name != "loss_mask"}
    losses, ratio = token_formula(summary, given, rules)
    loss = (given["token_weights"] * losses).sum()
    loss.backward()
    parts = (loss, summary[0], summary[1], ratio)
    return Answer(*(part.detach() for part in parts), hidden.grad, weight.grad)


def wide_leaves(head: Head) -> tuple[Tensor, Tensor]:
    """(hidden, weight) in fp64 that take gradients and share nothing with `head`."""
    hidden, weight = (matrix.detach().clone().double().requires_grad_() for matrix in (head.hidden, head.weight))
    return hidden, weight


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over that of what is wanted; 0 where both are empty or zero."""
    difference = (got.double() - want.double()).norm()
    return float(difference / want.double().norm()) if want.any() else float(difference)
