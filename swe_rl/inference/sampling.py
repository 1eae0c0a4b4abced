"""Sampling that depends on one row's logits and one counter only: the k-th token of a turn is a function of its seed.

Inverse transform sampling: with u uniform in [0, 1), the token is the first v whose cumulative probability exceeds u.
u comes from a counter-based generator (SplitMix64's finaliser, Steele, Lea and Flood 2014), so no generator state is
kept and nothing that happens to other rows can shift it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BITS = 52  # u stays at least 2**-52 below 1, so that u * total < total in fp64


def uniforms(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), [R], one per (seed, counter); both arrays are [R] uint64."""
    bits = _mix(_mix(seeds + _GOLDEN) + (counters + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def sample(logits: Tensor, temperatures: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Draws one token per row.

    logits [R, V]; temperatures [R] fp32, 0 is greedy; draws [R] fp64 in [0, 1).
    Returns ids [R] i64 and their logprobs [R] fp32: log softmax(logits / temperature), for greedy rows at temperature
    1.
    """
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    target = draws[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)[:, 0]
    if bool(greedy.any()):
        ids = torch.where(greedy, logprobs.argmax(dim=-1), ids)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]
