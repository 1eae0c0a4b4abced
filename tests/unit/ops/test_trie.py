"""The C++ trie and packer against their Python twin, and both against the definitions."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from real_parts import require

from swe_rl.errors import ConfigError
from swe_rl.ops import trie

IMPLS = ("cpu", "reference")
samples_of_few_tokens = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=14)


@pytest.fixture(autouse=True)
def _built() -> None:
    require(*trie.available())


def flat(samples: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([token for sample in samples for token in sample], dtype=torch.int64)
    return ids, trie.flat_offsets([len(sample) for sample in samples])


def check(samples: list[list[int]]) -> None:
    """Twins agree, and what they say is what the definitions say."""
    ids, offsets = flat(samples)
    forests = [trie.build_forest(ids, offsets, impl=impl) for impl in IMPLS]
    rows = [trie.tree_rows(ids, offsets, forest, impl=impl) for impl, forest in zip(IMPLS, forests, strict=True)]
    assert torch.equal(forests[0].order, forests[1].order)
    assert torch.equal(forests[0].shared, forests[1].shared)
    for name in trie.TreeRows.__slots__:
        assert torch.equal(getattr(rows[0], name), getattr(rows[1], name)), name
    order, found = forests[0].order.tolist(), rows[0]
    assert sorted(order) == list(range(len(samples)))
    contexts = {tuple(sample[: n + 1]) for sample in samples for n in range(len(sample))}
    assert len(found.input_ids) == len(contexts), "every distinct context is one row"
    ends, start = found.kv_end.tolist(), 0
    for name in order:
        sample = samples[name]
        mine = found.row_of[start : start + len(sample)].tolist()
        start += len(sample)
        assert found.input_ids[mine].tolist() == sample
        assert found.position_ids[mine].tolist() == list(range(len(sample)))
        for depth, row in enumerate(mine):  # what a row sees is its own path and nothing else
            assert [k for k in range(row + 1) if ends[k] > row] == mine[: depth + 1]


@given(samples_of_few_tokens)
def test_rows_are_the_distinct_contexts_and_see_their_own_path(samples: list[list[int]]) -> None:
    check(samples)


@pytest.mark.parametrize("children", [7, 8, 9, 40])
def test_nodes_with_many_children(children: int) -> None:
    """Children are found by hash from the eighth on; splitting a parent afterwards must not lose them."""
    rng = random.Random(children)
    samples = [[5, 6, 7, first, rng.randrange(3)] for first in range(children)]
    samples += [[5, 6, 8], [5, 9], *([5, 6, 7, first, 3] for first in range(children + 1)), [5, 6, 7]]
    check(samples)


def test_children_stand_in_the_order_in_which_they_came() -> None:
    forest = trie.build_forest(*flat([[1, 2, 3], [9], [1, 5], [1], [1, 2], [1, 5, 0], [1, 2, 3]]))
    assert forest.order.tolist() == [3, 4, 0, 6, 2, 5, 1]
    assert forest.shared.tolist() == [0, 1, 2, 3, 1, 2, 0]


def test_ids_may_be_any_int64() -> None:
    check([[-1, 1 << 62], [-1, -(1 << 62)], [1 << 40], [0], [-1, 1 << 62, 0]])


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 35))
def test_first_fit_is_that_of_the_twin_and_respects_the_budget(lengths: list[int], budget: int) -> None:
    rows = trie.first_fit(lengths, budget, impl="cpu")
    assert rows == trie.first_fit(lengths, budget, impl="reference")
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[piece] for piece in row) <= budget or len(row) == 1


def test_bad_arguments_name_the_argument_and_the_cure() -> None:
    ids, offsets = flat([[1, 2], [3]])
    with pytest.raises(ValueError, match=r"ids must be .* int64"):
        trie.build_forest(ids.int(), offsets)
    with pytest.raises(ValueError, match="ids must be contiguous, its stride is 2"):
        trie.build_forest(ids.repeat_interleave(2)[::2], offsets)
    with pytest.raises(ValueError, match="flat_offsets"):
        trie.build_forest(ids, offsets[:-1])
    with pytest.raises(ValueError, match="first sample shares nothing"):
        trie.tree_rows(ids, offsets, trie.Forest(torch.tensor([0]), torch.tensor([1])))
    for order in ([-1, 0], [0, 2]):
        with pytest.raises(ValueError, match="outside of the 2 that offsets delimits"):
            trie.tree_rows(ids, offsets, trie.Forest(torch.tensor(order), torch.tensor([0, 0])))
    for shared in (-1, 2):
        with pytest.raises(ValueError, match="between 0 and the length"):
            trie.tree_rows(ids, offsets, trie.Forest(torch.tensor([0, 1]), torch.tensor([0, shared])))
    with pytest.raises(ValueError, match="every piece needs a token"):
        trie.first_fit([3, 0], 5)
    with pytest.raises(ConfigError, match="impl='gpu'"):
        trie.build_forest(ids, offsets, impl="gpu")


def test_a_part_of_a_forest_has_the_rows_of_its_samples() -> None:
    samples = [[1, 2, 3], [1, 2, 4], [7, 8]]
    ids, offsets = flat(samples)
    for impl in IMPLS:
        part = trie.tree_rows(ids, offsets, trie.Forest(torch.tensor([1, 2]), torch.tensor([0, 0])), impl=impl)
        assert part.input_ids.tolist() == [1, 2, 4, 7, 8]
        assert part.kv_end.tolist() == [3, 3, 3, 5, 5]
        assert part.row_of.tolist() == [0, 1, 2, 3, 4]
