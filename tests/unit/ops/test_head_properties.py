"""What holds for any head: no answer depends on masked rows, on the order of rows, on chunks or on the number of calls.

And the bounds of probability: logprob <= 0, 0 <= entropy <= ln V, dlogits of a row sum to 0.
"""

from __future__ import annotations

import math
from typing import Any

import head_formulas as formulas
import pytest
import torch
from head_formulas import Head, relative
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from swe_rl import ops
from swe_rl.ops import cpu_rows


def heads_with(*spreads: float) -> st.SearchStrategy[Head]:
    return st.builds(
        formulas.make_head,
        rows=st.integers(1, 40),
        vocab=st.sampled_from([1, 2, 7, 16, 63, 130, 1000]),
        features=st.integers(1, 9),
        dtype=st.just(torch.float32),
        seed=st.integers(0, 10**6),
        spread=st.sampled_from(spreads),
    )


heads = heads_with(0.1, 1.0)
steep_heads = heads_with(1.0, 30.0)  # logits beyond 100: their own rounding shows in every probability
temperatures = st.sampled_from([1.0, 0.6, 1.7])
softcaps = st.sampled_from([0.0, 20.0])
cases = st.sampled_from(sorted(formulas.RULES))


def loss_of(head: Head, columns: dict[str, Tensor], case: str, **options: Any) -> dict[str, Tensor]:
    """Loss, statistics and gradients under a rule of formulas.RULES."""
    names, rules = formulas.RULES[case]
    given_columns = {name: columns[name] for name in ("advantages", "token_weights", "loss_mask", *names)}
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    loss, stats = ops.linear_policy_loss(hidden, weight, head.labels, **given_columns, **rules, **options)
    loss.backward()
    return {"loss": loss.detach(), **stats, "grad_hidden": hidden.grad, "grad_weight": weight.grad}


def columns_of(head: Head, **options: Any) -> dict[str, Tensor]:
    return formulas.make_columns(head, fraction=0.6, **options)


def masked_rows(columns: dict[str, Tensor]) -> Tensor:
    return ~columns["loss_mask"]


@given(head=steep_heads, case=cases, junk=st.sampled_from([math.nan, math.inf, -1e30]))
@settings(max_examples=25)
def test_masked_rows_may_hold_anything(head: Head, case: str, junk: float) -> None:
    columns = columns_of(head)
    masked = masked_rows(columns)
    dirty_columns = {n: v if n == "loss_mask" else v.masked_fill(masked, junk) for n, v in columns.items()}
    dirty = Head(head.hidden.masked_fill(masked[:, None], junk), head.weight, head.labels.masked_fill(masked, -100))
    clean, found = loss_of(head, columns, case), loss_of(dirty, dirty_columns, case)
    assert all(torch.equal(value, found[name]) for name, value in clean.items())


@given(head=heads, case=cases, temperature=temperatures, seed=st.integers(0, 99))
@settings(max_examples=25)
def test_the_order_of_rows_does_not_matter(head: Head, case: str, temperature: float, seed: int) -> None:
    """Up to the rounding of sums over rows."""
    order = torch.randperm(len(head.hidden), generator=torch.Generator().manual_seed(seed))
    columns = columns_of(head, temperature=temperature)
    moved = Head(head.hidden[order], head.weight, head.labels[order])
    one = loss_of(head, columns, case, temperature=temperature)
    other = loss_of(moved, {n: c[order] for n, c in columns.items()}, case, temperature=temperature)
    assert close(other["grad_hidden"], one["grad_hidden"][order])
    assert close(other["grad_weight"], one["grad_weight"])
    rows, moved_rows = (~masked_rows(columns)).nonzero()[:, 0], (~masked_rows(columns))[order].nonzero()[:, 0]
    place = {int(row): i for i, row in enumerate(rows)}
    back = torch.tensor([place[int(order[row])] for row in moved_rows])
    assert close(other["logprobs"], one["logprobs"][back])


@given(head=heads, case=cases, size=st.integers(1, 7))
@settings(max_examples=25)
def test_the_size_of_chunks_does_not_matter(head: Head, case: str, size: int) -> None:
    columns = columns_of(head)
    whole = loss_of(head, columns, case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_rows, "MIN_ROWS", size)
        patch.setattr(cpu_rows, "CHUNK_BYTES", 0)
        patch.setattr(cpu_rows, "CACHE_BYTES", 0)
        cut = loss_of(head, columns, case)
    assert all(close(cut[name].float(), value.float()) for name, value in whole.items())


@given(head=heads, case=cases, cut=st.integers(0, 40))
@settings(max_examples=25)
def test_two_calls_are_one(head: Head, case: str, cut: int) -> None:
    """Sums of losses and gradients: what micro-batches rest on."""
    columns = columns_of(head)
    whole = loss_of(head, columns, case)
    parts = []
    for part in (slice(0, cut), slice(cut, None)):
        share = Head(head.hidden[part], head.weight, head.labels[part])
        parts.append(loss_of(share, {n: c[part] for n, c in columns.items()}, case))
    assert close(parts[0]["grad_weight"] + parts[1]["grad_weight"], whole["grad_weight"])
    for name in ("logprobs", "entropy", "ratio", "grad_hidden"):
        assert close(torch.cat([part[name] for part in parts]), whole[name])
    size = max(1.0, float(columns["token_weights"].sum()) * 30)
    assert abs(float(parts[0]["loss"] + parts[1]["loss"] - whole["loss"])) <= 2e-5 * size


@given(head=steep_heads, temperature=temperatures, softcap=softcaps)
@example(head=formulas.make_head(5, 2, 5, torch.float32, seed=91095, spread=30.0), temperature=0.6, softcap=20.0)
@settings(max_examples=40)
def test_bounds_of_probability(head: Head, temperature: float, softcap: float) -> None:
    """To the last bit below; above, ln V is itself rounded."""
    logprobs, entropy = ops.linear_logprob(*head, temperature=temperature, softcap=softcap)
    assert (logprobs <= 0).all()
    assert (entropy >= 0).all()
    assert (entropy <= math.log(len(head.weight)) * (1 + 3e-7)).all()


@given(head=heads, case=cases, temperature=temperatures)
@settings(max_examples=25)
def test_dlogits_of_a_row_sum_to_zero(head: Head, case: str, temperature: float) -> None:
    """A constant feature of the weight has the sum of dlogits as its gradient. z-loss alone acts on the sum."""
    names, rules = formulas.RULES[case]
    if rules.get("z_loss_coeff"):
        return
    ones = torch.ones(len(head.weight), 1)
    padded = Head(torch.nn.functional.pad(head.hidden, (0, 1)), torch.cat([head.weight, ones], 1), head.labels)
    columns = columns_of(head, temperature=temperature)
    found = loss_of(padded, columns, case, temperature=temperature)
    slope = 10.0 * columns["token_weights"] / temperature
    assert (found["grad_hidden"][:, -1].abs() <= 2e-6 * slope * (1 + len(names))).all()


@given(head=heads, temperature=temperatures)
@settings(max_examples=25)
def test_on_policy_is_the_ratio_with_the_own_logprobs(head: Head, temperature: float) -> None:
    columns = columns_of(head, temperature=temperature)
    rows = (~masked_rows(columns)).nonzero()[:, 0]
    old = torch.zeros(len(head.hidden))
    old[rows] = loss_of(head, columns, "on policy", temperature=temperature)["logprobs"]
    plain = loss_of(head, columns, "on policy", temperature=temperature)
    for case in ("ppo", "ppo once"):
        found = loss_of(head, {**columns, "old_logprobs": old}, case, temperature=temperature)
        assert all(torch.equal(found[name], value) for name, value in plain.items())


def close(got: Tensor, want: Tensor) -> bool:
    """Within 1e-5 of the norm, or of 1 where the norm is small (a row of a single token has no gradient)."""
    return relative(got, want) <= 1e-5 or float((got.double() - want.double()).norm()) <= 2e-5
