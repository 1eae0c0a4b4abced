"""The loss of a whole batch straight from the published formulas, in fp64. Imports nothing of the package.

A row is one episode: a list of turns, each with the logprobs of its sampled tokens by the current policy (the leaf that
is differentiated), the old policy, the engine and the reference. Rows of one group belong to one task.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Row:
    group: str
    reward: float
    lengths: list[int]  # sampled tokens of each turn
    states: list[str]  # what the policy had seen before each turn
    current: Tensor  # [L], leaf
    old: Tensor
    engine: Tensor
    ref: Tensor
    entropy: Tensor  # [L], leaf
    values: list[float]  # V before each turn
    masked: bool = False  # no token trains

    @property
    def turn_of(self) -> Tensor:
        return torch.tensor([t for t, n in enumerate(self.lengths) for _ in range(n)])


@dataclass
class Case:
    advantage: str = "leave_one_out"
    ratio: str = "ppo"
    correction: str = "none"
    aggregation: str = "token_mean"
    low: float = 0.2
    high: float = 0.28
    dual: float = 0.0
    correction_low: float = 0.5
    correction_cap: float = 2.0
    constant: float = 64.0
    kl: float = 0.0
    estimator: str = "k3"
    entropy: float = 0.0
    gamma: float = 1.0
    lam: float = 1.0
    rejected_leave: bool = False
    negative: float = 1.0  # factor of negative advantages
    extra: dict[str, float] = field(default_factory=dict)


def per_turn_advantages(rows: list[Row], case: Case) -> list[list[float]]:
    """C1 of the notes, one number per turn."""
    found: list[list[float]] = []
    for row in rows:
        mates = [other for other in rows if other.group == row.group]
        others = [other for other in mates if other is not row]
        rewards = [other.reward for other in mates]
        mean = sum(rewards) / len(rewards)
        equal = max(rewards) == min(rewards)
        if case.advantage == "leave_one_out":
            value = 0.0 if equal else row.reward - sum(o.reward for o in others) / len(others)
            found.append([value] * len(row.lengths))
        elif case.advantage in ("group_mean", "reinforce_pp"):
            found.append([row.reward - mean] * len(row.lengths))
        elif case.advantage == "group_std":
            spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) if len(rewards) > 1 else 0.0
            found.append([0.0 if equal else (row.reward - mean) / (spread + 1e-6)] * len(row.lengths))
        elif case.advantage == "turn_level":
            values = []
            for state in row.states:
                there = [o.reward for o in others if state in o.states]
                base = there or [o.reward for o in others]
                values.append(row.reward - sum(base) / len(base) if base else 0.0)
            found.append(values)
        else:  # gae: sum of discounted temporal differences, written as the double sum
            turns = len(row.lengths)
            value = [*row.values, 0.0]
            gain = [0.0] * (turns - 1) + [row.reward]
            delta = [gain[t] + case.gamma * value[t + 1] - value[t] for t in range(turns)]
            found.append(
                [sum((case.gamma * case.lam) ** (u - t) * delta[u] for u in range(t, turns)) for t in range(turns)]
            )
    if case.advantage == "reinforce_pp":
        trained = [(a[0], sum(row.lengths)) for row, a in zip(rows, found, strict=True) if not row.masked]
        count = sum(n for _, n in trained)
        mean = sum(a * n for a, n in trained) / count
        variance = sum(n * (a - mean) ** 2 for a, n in trained) / (count - 1)
        found = [[(a - mean) / math.sqrt(variance + 1e-8) for a in values] for values in found]
    return [[a * (case.negative if a < 0 else 1.0) for a in values] for values in found]


def row_coefficient(row: Row, case: Case) -> Tensor:
    """C3: a constant per token that multiplies the policy term."""
    log_w = row.old - row.engine
    low, cap = case.correction_low, case.correction_cap
    w, one = log_w.exp(), torch.ones_like(log_w)
    product, geometric = log_w.sum().exp(), log_w.mean().exp()
    if case.correction == "none":
        return one
    if case.correction == "tis":
        return w.clamp(max=cap)
    if case.correction == "mask":
        return torch.where((w >= low) & (w <= cap), w, 0.0 * one)
    if case.correction == "sequence_tis":
        return one * min(product, torch.tensor(cap, dtype=product.dtype))
    if case.correction == "sequence_mask":
        return one * (product if low <= product <= cap else 0.0)
    return one * float(low <= geometric <= cap)


def token_terms(row: Row, advantage: Tensor, case: Case) -> Tensor:
    """C2: the policy term of each token."""
    r = (row.current - row.old).exp()
    if case.ratio == "gspo":  # token form: value s, gradient s times that of the token's logprob
        s = (row.current - row.old).mean().exp().detach()
        r = s * (row.current - row.current.detach()).exp()
    if case.ratio in ("ppo", "gspo"):
        loss = torch.maximum(-advantage * r, -advantage * r.clamp(1 - case.low, 1 + case.high))
        if case.dual:
            loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * case.dual), loss)
        return loss
    if case.ratio == "cispo":
        return -r.detach().clamp(1 - case.low, 1 + case.high) * advantage * row.current
    return -advantage * (row.current - row.current.detach()).exp()  # the plain policy gradient


def penalties(row: Row, case: Case) -> Tensor:
    d = row.current - row.ref
    estimate = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[case.estimator]
    return case.kl * estimate - case.entropy * row.entropy


def loss(rows: list[Row], case: Case) -> Tensor:
    """C4 over everything."""
    advantages = per_turn_advantages(rows, case)
    total = torch.zeros((), dtype=torch.float64)
    kept = [
        row
        for row in rows
        if row.masked or not (case.rejected_leave and float(row_coefficient(row, case).max()) == 0.0)
    ]
    trained = [row for row in kept if not row.masked]
    tokens = sum(sum(row.lengths) for row in trained)
    for row, per_turn in zip(rows, advantages, strict=True):
        if not any(row is other for other in trained):
            continue
        a = torch.tensor(per_turn, dtype=torch.float64)[row.turn_of]
        each = token_terms(row, a, case) * row_coefficient(row, case) + penalties(row, case)
        length = sum(row.lengths)
        if case.aggregation == "token_mean":
            share = each.sum() / tokens
        elif case.aggregation == "seq_mean":
            share = each.sum() / length / len(trained)
        elif case.aggregation == "seq_sum":
            share = each.sum() / len(trained)
        elif case.aggregation == "seq_sum_const":
            share = each.sum() / case.constant / len(kept)
        elif case.aggregation == "sum_const":
            share = each.sum() / case.constant
        else:  # turn_mean
            nonempty = [n for n in row.lengths if n]
            share = sum(part.sum() / len(part) for part in each.split(nonempty)) / len(nonempty) / len(trained)
        total = total + share
    return total
