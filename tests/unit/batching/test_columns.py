"""Lists of numbers as tensors: what torch.tensor makes of them, only faster."""

from __future__ import annotations

import math

import pytest
import torch

from swe_rl.batching.columns import column, indices

PARTS = {
    torch.int64: [[1, -2, 2**40], [], [0]],
    torch.int32: [[7], [-(2**31), 2**31 - 1]],
    torch.float32: [[0.1, math.nan, -math.inf], [1, True], [1 / 3, 1e-40]],
    torch.bool: [[True, False], [], [False, True, True]],
}


@pytest.mark.parametrize("dtype", PARTS)
def test_columns_are_those_of_torch(dtype: torch.dtype) -> None:
    got = column(PARTS[dtype], dtype)
    want = torch.tensor([value for part in PARTS[dtype] for value in part], dtype=dtype)
    assert got.dtype == dtype
    assert torch.equal(
        got.nan_to_num() if dtype == torch.float32 else got, want.nan_to_num() if dtype == torch.float32 else want
    )
    got[0] = got[1]  # the tensor owns its memory
    assert column([], dtype).shape == column([[], []], dtype).shape == (0,)


def test_a_generator_will_do_and_numbers_that_do_not_fit_are_refused() -> None:
    assert column(([n] * n for n in range(3)), torch.int64).tolist() == [1, 2, 2]
    with pytest.raises(OverflowError):
        column([[2**31]], torch.int32)


def test_indices_of_flags() -> None:
    assert indices([False, True, True, False, True]) == [1, 2, 4]
    assert indices([False]) == indices([]) == []
