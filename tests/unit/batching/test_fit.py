"""Which samples of a forest stand in one row: what is repeated, what is left free."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swe_rl.batching.fit import cut, fit, shared_in_row


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths and shared lengths that a forest can have."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    shared = [0]
    for before, length in itertools.pairwise(lengths):
        shared.append(draw(st.integers(0, min(before, length))))
    return lengths, shared


@given(forests(), st.integers(1, 30))
def test_cuts_repeat_as_little_as_possible(forest: tuple[list[int], list[int]], max_tokens: int) -> None:
    """Against every way to cut."""
    lengths, shared = forest

    def tokens(start: int, stop: int) -> int:
        return lengths[start] + sum(lengths[k] - shared[k] for k in range(start + 1, stop))

    def cost(borders: list[int]) -> tuple[int, int] | None:
        parts = list(itertools.pairwise(borders))
        if any(tokens(a, b) > max_tokens and b - a > 1 for a, b in parts):
            return None
        return sum(shared[a] for a, _ in parts), len(parts)

    roots = [k for k in range(1, len(lengths)) if not shared[k]]
    others = [k for k in range(1, len(lengths)) if shared[k]]
    chosen = [c for n in range(len(others) + 1) for c in itertools.combinations(others, n)]
    best = min(found for c in chosen if (found := cost(sorted((0, *roots, *c, len(lengths))))) is not None)
    pieces = cut(lengths, shared, max_tokens=max_tokens)
    borders = [piece.start for piece in pieces] + [len(lengths)]
    assert cost(borders) == best
    assert [piece.tokens for piece in pieces] == [tokens(a, b) for a, b in itertools.pairwise(borders)]


@given(forests(), st.integers(1, 30))
def test_rows_hold_every_sample_once_and_no_more_than_they_may(
    forest: tuple[list[int], list[int]], budget: int
) -> None:
    lengths, shared = forest
    rows = fit(lengths, shared, max_tokens=budget)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    for row in rows:
        assert row == sorted(row)
        tokens = sum(lengths[k] - low for k, low in zip(row, shared_in_row(row, shared), strict=True))
        assert tokens <= max(budget, *(lengths[k] for k in row))


def groups(seed: int, *, count: int, size: int) -> tuple[list[int], list[int]]:
    """Rollouts of groups that share a prompt; lengths differ by a factor of twenty."""
    rng = random.Random(seed)
    lengths, shared = [], []
    for _ in range(count):
        prompt = rng.randrange(1_500, 4_000)
        for index in range(size):
            lengths.append(prompt + round(rng.choice((5, 12, 24, 40)) * rng.uniform(0.3, 1.7)) * 900)
            shared.append(prompt if index else 0)
    return lengths, shared


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_realistic_mix_are_full(seed: int) -> None:
    budget = 131_072
    lengths, shared = groups(seed, count=32, size=8)
    rows = fit(lengths, shared, max_tokens=budget)
    distinct = sum(lengths) - sum(shared)
    packed = sum(lengths[k] - low for row in rows for k, low in zip(row, shared_in_row(row, shared), strict=True))
    assert packed / (budget * len(rows)) >= 0.95
    assert packed <= 1.03 * distinct, "the room is not filled with repeated tokens"
    assert len(rows) <= 1.06 * distinct / budget + 1
