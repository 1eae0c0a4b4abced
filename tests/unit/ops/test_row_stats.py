"""The five numbers of a row: what follows from them, and that partial ones merge into those of the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swe_rl.ops import row_stats


def stats_of(logits: Tensor, labels: Tensor) -> Tensor:
    """[C, 5] by their definition; a part of no columns has a maximum of -inf and sums of 0."""
    if logits.shape[1] == 0:
        return torch.tensor([[-math.inf, 0.0, 0.0, 0.0, -math.inf]], dtype=logits.dtype).expand(len(logits), 5)
    top = logits.amax(dim=1, keepdim=True)
    distance = logits - top
    mass = distance.exp()
    here = (labels >= 0) & (labels < logits.shape[1])
    at_label = logits.gather(1, labels.clamp(0, logits.shape[1] - 1)[:, None])[:, 0].where(here, -math.inf)
    return torch.stack([top[:, 0], mass.sum(1), (mass * distance).sum(1), (mass * mass).sum(1), at_label], dim=1)


def test_a_row_worked_by_hand() -> None:
    """Logits ln 4, ln 2, ln 2: probabilities 1/2, 1/4, 1/4."""
    stats = stats_of(torch.tensor([[4.0, 2.0, 2.0]], dtype=torch.float64).log(), torch.tensor([1]))
    assert row_stats.logprobs(stats).item() == pytest.approx(math.log(0.25))
    assert row_stats.entropy(stats).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    assert row_stats.log_normalizer(stats).item() == pytest.approx(math.log(8))
    assert row_stats.log_sum(stats).item() == pytest.approx(math.log(2))
    squares = float(stats[0, row_stats.SQUARES] / stats[0, row_stats.SUM] ** 2)
    assert squares == pytest.approx(0.25 + 2 / 16), "the chance that two samples agree"


@given(
    widths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    offset=st.sampled_from([0.0, -3e3, 3e3]),
    seed=st.integers(0, 1000),
)
def test_parts_merge_into_the_whole(widths: list[int], offset: float, seed: int) -> None:
    """Parts of any width, empty ones included, whose maxima lie far apart."""
    generator = torch.Generator().manual_seed(seed)
    logits = offset + 30 * torch.randn(4, sum(widths), generator=generator, dtype=torch.float64)
    labels = torch.randint(sum(widths), (4,), generator=generator)
    parts, start = [], 0
    for width in widths:
        parts.append(stats_of(logits[:, start : start + width], labels - start))
        start += width
    torch.testing.assert_close(row_stats.merge(torch.stack(parts)), stats_of(logits, labels), rtol=1e-12, atol=1e-12)


def test_nan_of_one_part_spoils_the_whole() -> None:
    good = stats_of(torch.randn(1, 5), torch.tensor([1]))
    for column in range(row_stats.NUM_STATS - 1):
        bad = good.clone()
        bad[0, column] = math.nan
        merged = row_stats.merge(torch.stack([good, bad]))
        assert column == row_stats.SQUARES or row_stats.entropy(merged).isnan().all()
        assert column in (row_stats.SQUARES, row_stats.WEIGHTED) or row_stats.logprobs(merged).isnan().all()


def test_slopes_give_the_gradient_of_the_three_outputs() -> None:
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (6,))
    d = torch.randn(3, 6, dtype=torch.float64)
    logp = torch.log_softmax(logits, dim=1)
    outputs = (logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(1), torch.logsumexp(logits, dim=1))
    sum((weight * output).sum() for weight, output in zip(d, outputs, strict=True)).backward()
    with torch.no_grad():
        top, log_sum, at_label, constant, linear = row_stats.slopes(stats_of(logits, labels), *d).T[..., None]
        own = logits - top - log_sum
        onehot = torch.nn.functional.one_hot(labels, 11)
        got = at_label * onehot + own.exp() * (constant + linear * own)
    torch.testing.assert_close(got, logits.grad, rtol=1e-12, atol=1e-13)
