"""The context-parallel section of the GPU suite computes what it says, here on a CPU."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("mask", ["document", "tree"])
def test_parts_of_all_ranks_are_the_whole(mask: str, ranks: int) -> None:
    import gpu_context
    from attention_shapes import AttentionCase, make_inputs

    inputs = make_inputs(AttentionCase(301, 4, 2, 16, mask, "forward", "float32", "cpu"))
    rows = sorted(int(row) for found, _ in gpu_context.rank_parts(inputs, ranks) for row in found)
    assert rows == list(range(len(rows)))
    assert len(rows) >= 301
    assert gpu_context.largest_error(inputs, ranks) < 1e-5


def test_the_slowest_rank_is_at_least_the_mean() -> None:
    import gpu_context
    from attention_shapes import AttentionCase, make_inputs

    inputs = make_inputs(AttentionCase(64, 2, 1, 16, "document", "forward", "float32", "cpu"))
    assert gpu_context.imbalance(inputs, 1) == 1.0
    assert gpu_context.imbalance(inputs, 2) >= 1.0
