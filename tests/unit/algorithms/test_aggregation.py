"""Token weights against the formulas, written out; global counts; fully masked rows."""

from __future__ import annotations

import math

import pytest

from swe_rl.algorithms import count_rows, count_tokens, token_weights
from swe_rl.algorithms.aggregation import MODES
from swe_rl.errors import ConfigError, InvariantError
from swe_rl.types import TrainSample


def sample(name: str, mask: str) -> TrainSample:
    bits = [c == "1" for c in mask]
    return TrainSample(
        trajectory_id=name,
        input_ids=list(range(len(bits))),
        loss_mask=bits,
        rollout_logprobs=[0.0] * len(bits),
        advantages=[1.0] * len(bits),
        turn_ids=[0 if b else -1 for b in bits],
        policy_version=0,
        temperature=1.0,
    )


BATCH = [sample("a", "0110"), sample("b", "0111101"), sample("masked", "000")]  # 2 + 5 + 0 trained tokens


def weigh(samples: list[TrainSample], mode: str, max_tokens: int = 16) -> list[list[float]]:
    rows, tokens = count_rows(samples, mode), count_tokens(samples)
    filled = token_weights(samples, mode, max_tokens=max_tokens, num_rows_global=rows, num_tokens_global=tokens)
    return [s.token_weights for s in filled]


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        ("token_mean", 1 / 7, 1 / 7),  # all trained tokens alike; the masked row has no effect
        ("seq_mean", 1 / (2 * 2), 1 / (2 * 5)),  # two rows with a trained token
        ("seq_sum_const", 1 / (3 * 16), 1 / (3 * 16)),  # every row counts, the masked one too
    ],
)
def test_worked_example(mode: str, first: float, second: float) -> None:
    got = weigh(BATCH, mode)
    assert got[0] == pytest.approx([0, first, first, 0])
    assert got[1] == pytest.approx([0, second, second, second, second, 0, second])
    assert got[2] == [0, 0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_with_global_counts_equal_one_process(mode: str) -> None:
    whole = weigh(BATCH, mode)
    parts = [BATCH[:1], BATCH[1:]]
    rows = sum(count_rows(part, mode) for part in parts)
    tokens = sum(count_tokens(part) for part in parts)
    split = []
    for part in parts:
        filled = token_weights(part, mode, max_tokens=16, num_rows_global=rows, num_tokens_global=tokens)
        split += [s.token_weights for s in filled]
    assert split == whole


@pytest.mark.parametrize("mode", MODES)
def test_all_masked_gives_zeros_not_nan(mode: str) -> None:
    assert weigh([sample("a", "000"), sample("b", "00")], mode) == [[0, 0, 0], [0, 0]]
    assert weigh([], mode) == []


def test_adding_a_masked_row_changes_only_the_mode_that_counts_it() -> None:
    for mode in MODES:
        before, after = weigh(BATCH[:2], mode), weigh(BATCH, mode)
        scale = 2 / 3 if mode == "seq_sum_const" else 1.0
        for old, new in zip(before, after, strict=False):
            assert new == pytest.approx([scale * v for v in old])


def test_a_trajectory_split_into_samples_is_one_row() -> None:
    parts = [sample("a", "011"), sample("a", "0100"), sample("b", "01")]
    assert count_rows(parts, "seq_mean") == count_rows(parts, "seq_sum_const") == 2
    got = weigh(parts, "seq_mean")
    assert got[0][1] == got[1][1] == pytest.approx(1 / (2 * 3))
    assert math.fsum(v for row in got for v in row) == pytest.approx(1.0)


def test_local_counts_passed_for_global_ones_are_refused() -> None:
    with pytest.raises(InvariantError, match="summed over all ranks"):
        token_weights(BATCH, "token_mean", max_tokens=16, num_rows_global=3, num_tokens_global=6)


def test_unknown_mode() -> None:
    with pytest.raises(ConfigError, match=r"algo\.aggregation='mean'"):
        count_rows(BATCH, "mean")
