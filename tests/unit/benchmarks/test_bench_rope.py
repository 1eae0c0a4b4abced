"""bench_rope.py and long_step.py: providers compute the same, rows are complete, the trajectory is as described."""

from __future__ import annotations

import argparse
from itertools import groupby

import bench_rope
import long_step
import pytest
from bench_rope import PROVIDERS, RopeCase, RopeInputs


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name != "transformers_compiled"])
@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
def test_providers_compute_the_same(provider: str, mode: str) -> None:
    inputs = RopeInputs(RopeCase(37, 5, 2, 24, mode, "float32", "cpu"))
    assert 0 < bench_rope.error_of(inputs, provider) < 1e-6
    outputs = PROVIDERS[provider](inputs)
    assert len(outputs) == (2 if mode == "forward" else 3)  # the gradient is that of the fused projection
    assert outputs[-1].shape[0] == 37


def test_rows_say_what_ran_and_what_did_not() -> None:
    case = RopeCase(16, 2, 1, 8, "forward", "float32", "cpu")
    args = argparse.Namespace(repeats=2, threads=1)
    rows = {row["provider"]: row for row in bench_rope.bench(case, ["ours", "transformers"], args)}
    assert list(rows) == ["copy", "ours", "transformers"]
    for row in rows.values():
        assert tuple(row) == bench_rope.COLUMNS
        assert float(str(row["p50_s"])) > 0
    assert case.bytes_moved == 2 * 16 * 3 * 8 * 4


@pytest.mark.parametrize("num_tokens", [256, 5000, 20000])
def test_the_trajectory_has_a_prompt_and_turns_of_which_a_fifth_is_trained(num_tokens: int) -> None:
    sample = long_step.trajectory(num_tokens)
    runs = [(trained, len(list(run))) for trained, run in groupby(sample.loss_mask)]
    assert sum(length for _, length in runs) == num_tokens
    assert all(length <= 400 for trained, length in runs if trained)
    if num_tokens >= 5000:
        assert 0.18 <= sum(sample.loss_mask) / num_tokens <= 0.25
    assert sum(sample.token_weights) == pytest.approx(1.0)
    assert sample.input_ids == long_step.trajectory(num_tokens).input_ids


def test_memory_that_grows_faster_than_tokens_is_not_linear() -> None:
    def rows(*mib: int) -> list[dict[str, int]]:
        return [{"tokens": 1000 << i, "base_mib": 400, "peak_mib": 400 + m} for i, m in enumerate(mib)]

    assert long_step.linear(rows(100, 200, 400))
    assert long_step.linear(rows(100, 180, 330))
    assert not long_step.linear(rows(100, 260, 700))
    assert not long_step.linear(rows(100, 100))
