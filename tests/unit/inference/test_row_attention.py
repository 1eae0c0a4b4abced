"""Attention of one row does not show which thread it fell to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from swe_rl.models.attention import additive_mask, attend_alone


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"), [(3, 3, 64), (2, 1, 32), (1, 7, 80), (2, 4, 16), (1, 9, 128)]
)
@pytest.mark.parametrize("span", [64, 192, 512])
def test_rows_together_are_rows_alone(dtype: torch.dtype, kv_heads: int, group: int, head_dim: int, span: int) -> None:
    rows = 17
    generator = torch.Generator().manual_seed(span + head_dim)
    query = torch.randn((rows, kv_heads, group, head_dim), generator=generator).to(dtype)
    keys, values = torch.randn((2, 1, kv_heads, span, head_dim), generator=generator).to(dtype)
    mask = additive_mask(torch.arange(rows) + span - 20, span, dtype)

    def some(first: int, last: int) -> torch.Tensor:
        count = last - first
        expanded = [tensor.expand(count, -1, -1, -1) for tensor in (keys, values)]
        return attend_alone(query[first:last], *expanded, mask=mask[first:last])

    together = some(0, rows)
    allowed = mask[:, 0, 0, None, None, :].double()
    scores = torch.einsum("rhgd,hsd->rhgs", query.double(), keys[0].double()) / head_dim**0.5 + allowed
    exact = torch.einsum("rhgs,hsd->rhgd", scores.softmax(-1), values[0].double())
    torch.testing.assert_close(
        together.double(),
        exact,
        **({"atol": 2e-2, "rtol": 0} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 0}),
    )
    for borders in ([0, 8, rows], [0, 5, 7, rows], list(range(rows + 1))):
        parts = [some(a, b) for a, b in itertools.pairwise(borders)]
        assert torch.equal(torch.cat(parts), together), borders
