"""Which layout is chosen, what it costs, and how rows are shared out between ranks."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_groups import random_group

from swe_rl.batching.balance import balance
from swe_rl.batching.layout import TREE_SLOWDOWN, batch_cost, lay_out
from swe_rl.types import TrainSample


def sample(name: str, prompt: int, own: int) -> TrainSample:
    """`prompt` tokens that all have, then `own` sampled ones that nobody else has."""
    size, first = prompt + own, 1000 * (1 + ord(name))
    return TrainSample(
        trajectory_id=name,
        input_ids=[*range(prompt), *range(first, first + own)],
        loss_mask=[False] * prompt + [True] * own,
        rollout_logprobs=[0.0] * size,
        advantages=[0.0] * size,
        turn_ids=[-1] * prompt + [0] * own,
        policy_version=0,
        temperature=1.0,
    )


def layout_of(samples: list[TrainSample], pair_cost: float) -> str:
    found = lay_out(samples, max_tokens=500, layout="auto", pair_cost=pair_cost)
    return "sequence" if found.batches[0].target_rows is None else "tree"


def test_auto_takes_trees_for_long_prompts_and_sequences_where_attention_would_cost_more() -> None:
    shared = [sample(name, 80, 20) for name in "abcd"]
    assert layout_of(shared, 0.0) == "tree"
    assert layout_of(shared, 0.1) == "tree"
    apart = [sample(name, 2, 98) for name in "abcd"]
    assert layout_of(apart, 0.0) == "tree", "it is less, if little"
    assert layout_of(apart, 0.1) == "sequence", "the slower attention outweighs 6 tokens of 400"


def test_the_cost_of_a_row_is_counted_pair_by_pair() -> None:
    rng = random.Random(3)
    for layout, slowdown in (("sequence", 1.0), ("tree", TREE_SLOWDOWN)):
        for batch in lay_out(random_group(rng, size=5), max_tokens=40, layout=layout).batches:
            rows = torch.arange(len(batch.input_ids))
            pairs = int(((rows[None] <= rows[:, None]) & (rows[:, None] < batch.kv_end[None])).sum())
            assert batch_cost(batch, pair_cost=0.25) == pytest.approx(len(rows) + 0.25 * slowdown * pairs)


def test_both_layouts_return_the_same_scores() -> None:
    samples = random_group(random.Random(1), size=5)
    for layout in ("sequence", "tree"):
        found = lay_out(samples, max_tokens=30, layout=layout)
        scores = [torch.where(b.loss_mask, b.labels * 2.0, 0.0) for b in found.batches]
        back = found.unpack(scores, fill=0.0)
        want = [[2.0 * i if m else 0.0 for i, m in zip(s.input_ids, s.loss_mask, strict=True)] for s in samples]
        assert back == want


@given(st.lists(st.floats(0.1, 50.0), max_size=24), st.integers(1, 5), st.integers(0, 9))
def test_balance_never_makes_the_busiest_rank_busier(costs: list[float], num_ranks: int, seed: int) -> None:
    rng = random.Random(seed)
    homes = [rng.randrange(num_ranks) for _ in costs]
    ranks = balance(costs, homes, num_ranks=num_ranks)

    def loads(where: list[int]) -> list[float]:
        return [sum(c for c, r in zip(costs, where, strict=True) if r == rank) for rank in range(num_ranks)]

    assert max(loads(ranks)) <= max(loads(homes)) + 1e-9
    after = loads(ranks)
    largest = max((c for c, r in zip(costs, ranks, strict=True) if after[r] == max(after)), default=0.0)
    assert max(after) - min(after) <= largest * (1 + 1e-6), "no row of the busiest rank fits into the gap"


def test_balance_moves_few_rows() -> None:
    assert balance([4.0, 1.0, 1.0, 2.0], [0, 0, 1, 1], num_ranks=2) == [0, 1, 1, 1]
    assert balance([3.0, 3.0], [0, 1], num_ranks=2) == [0, 1]
    assert balance([], [], num_ranks=3) == []
