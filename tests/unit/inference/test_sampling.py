"""Counter-based draws and inverse transform sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swe_rl.inference.sampling import sample, uniforms


def _u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_draws_are_a_function_of_seed_and_counter() -> None:
    first = uniforms(_u64(1, 1, 2), _u64(0, 1, 0))
    assert len(set(first.tolist())) == 3
    assert np.array_equal(uniforms(_u64(2, 1), _u64(0, 1)), first[[2, 1]])
    assert ((first >= 0) & (first < 1)).all()


def test_golden_draws() -> None:
    """Recomputed with plain Python integers: a change of the generator would silently change every run."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, counter in [(0, 0), (123, 4), (2**64 - 1, 9)]:
        bits = mix((mix((seed + golden) % 2**64) + (counter + 1) * golden) % 2**64)
        assert uniforms(_u64(seed), _u64(counter))[0] == (bits >> 12) / 2**52


def test_draws_are_uniform_over_counters_and_seeds() -> None:
    n = 20_000
    ones = np.ones(n, dtype=np.uint64)
    for draws in (
        uniforms(ones * np.uint64(5), np.arange(n, dtype=np.uint64)),
        uniforms(np.arange(n, dtype=np.uint64), ones),
    ):
        counts = np.histogram(draws, bins=50, range=(0, 1))[0]
        chi2 = ((counts - n / 50) ** 2 / (n / 50)).sum()
        assert chi2 < 95  # 49 degrees of freedom: p about 1e-4
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_frequencies_match_the_softmax(temperature: float) -> None:
    n = 20_000
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, float("-inf"), 0.5]).expand(n, -1)
    draws = torch.from_numpy(uniforms(np.full(n, 9, dtype=np.uint64), np.arange(n, dtype=np.uint64)))
    ids, logprobs = sample(logits, torch.full((n,), temperature), draws)
    probs = torch.softmax(logits[0] / temperature, 0)
    counts = torch.bincount(ids, minlength=6)
    assert counts[4] == 0
    expected = probs[probs > 0] * n
    assert float(((counts[probs > 0] - expected) ** 2 / expected).sum()) < 24  # 4 degrees of freedom, p < 1e-4
    torch.testing.assert_close(logprobs, torch.log(probs)[ids], rtol=1e-5, atol=1e-6)


def test_extreme_draws_stay_in_the_support() -> None:
    logits = torch.tensor([[float("-inf"), 1.0, 1.0, float("-inf")]] * 2)
    ids, _ = sample(logits, torch.ones(2), torch.tensor([0.0, 1.0 - 2.0**-52], dtype=torch.float64))
    assert ids.tolist() == [1, 2]


def test_greedy_rows_report_logprobs_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    ids, logprobs = sample(logits, torch.tensor([0.0, 2.0]), torch.tensor([0.999, 0.0], dtype=torch.float64))
    assert ids.tolist() == [1, 0]
    want = torch.stack([torch.log_softmax(logits[0], 0)[1], torch.log_softmax(logits[1] / 2, 0)[0]])
    torch.testing.assert_close(logprobs, want)
