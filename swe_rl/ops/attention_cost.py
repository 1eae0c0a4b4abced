"""How long each way of computing attention would take on a GPU: products, merging and launches, in seconds.

All figures below are assumptions, none was measured by this project. Rates are TFLOP/s of forward and backward with
head_dim 128 in bf16 on one long causal document, deterministic: those of others are what their authors publish for A100
and H100 (for Blackwell FlashAttention 4's; the rest as on H100), those of "triton" are what our kernels aim at. Only
their proportions matter to a choice. benchmarks/gpu_suite.py (section attention, TFLOP/s of each name from 4k to 131k
tokens) measures them: a figure that differs belongs here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swe_rl.ops.attention_mask import Run

ASSUMED_TFLOPS: dict[int, dict[str, tuple[float, float]]] = {  # by the first digits of the compute capability
    8: {"flash2": (190, 160), "torch_flash": (185, 155), "triton": (150, 100)},
    9: {
        "flash3": (650, 475),
        "flash4": (570, 400),
        "flash2": (370, 300),
        "torch_flash": (365, 295),
        "triton": (450, 300),
    },
    10: {
        "flash4": (1200, 800),
        "flash2": (370, 300),
        "torch_flash": (365, 295),
        "triton": (450, 300),
    },
}
BYTES_PER_S = {8: 1.6e12, 9: 3.0e12, 10: 6.5e12}  # of device memory, some 10 % below the data sheets
LAUNCH_S = 2e-5  # one more call, with the small operations around it
HALF_TILE = 64  # queries or keys that a kernel computes beyond the end of a stretch, on average


@dataclass(frozen=True)
class Shape:
    """Of one call of attention; bytes per element of the inputs."""

    tokens: int
    heads: int
    head_dim: int
    item_bytes: int = 2


def visible_pairs(found: Sequence[Run]) -> float:
    """(query, key) pairs of one head under the mask."""
    return sum(_square(run) + _rectangle(run) for run in found)


def _square(run: Run) -> float:
    length = run.stop - run.start
    return 0.5 * length * (length + 1)


def _rectangle(run: Run) -> float:
    return float(run.end - run.stop) * (run.stop - run.start)


def level_seconds(found: Sequence[Run], num_calls: int, shape: Shape, rates: tuple[float, float], major: int) -> float:
    """One call for the squares and one per depth, merged: forward and backward."""
    pairs = 0.0
    for run in found:
        length, below = run.stop - run.start, run.end - run.stop
        pairs += 0.5 * length * length + HALF_TILE * length
        if below:
            pairs += (below + HALF_TILE) * (length + HALF_TILE)
    merged = sum(run.end - run.stop for run in found)
    # A merged row is read and written in fp32 forward, gathered and added to in fp32 backward: about 12 passes.
    moved = 12 * 4 * merged * shape.heads * shape.head_dim
    return _products(pairs, shape, rates) + moved / BYTES_PER_S[major] + 2 * num_calls * LAUNCH_S


def triton_seconds(found: Sequence[Run], shape: Shape, rates: tuple[float, float]) -> float:
    """One call; blocks at the edge of what is visible are computed whole."""
    edges = shape.tokens * 2 * HALF_TILE + sum(HALF_TILE * (run.end - run.stop) for run in found if run.end > run.stop)
    dense = 0.5 * shape.tokens * (shape.tokens + 4 * HALF_TILE)
    return _products(min(visible_pairs(found) + edges, dense), shape, rates) + 4 * LAUNCH_S


def _products(pairs: float, shape: Shape, rates: tuple[float, float]) -> float:
    """Two products forward, five backward (what kernels recompute is in their rates)."""
    forward = 4 * pairs * shape.heads * shape.head_dim
    return (forward / rates[0] + 2.5 * forward / rates[1]) / 1e12


def cheapest(
    found: Sequence[Run], num_calls: int | None, usable: Sequence[str], shape: Shape, major: int
) -> tuple[str, Mapping[str, float]]:
    """(name, seconds of each): the fastest of `usable`, the first of equals. num_calls None: runs do not nest."""
    table = ASSUMED_TFLOPS.get(major, ASSUMED_TFLOPS[8])
    major = major if major in ASSUMED_TFLOPS else 8
    costs: dict[str, float] = {}
    for name in usable:
        rates = table.get(name)
        if name == "triton" and rates is not None:
            costs[name] = triton_seconds(found, shape, rates)
        elif rates is not None and num_calls is not None:
            costs[name] = level_seconds(found, num_calls, shape, rates, major)
    if not costs:
        return "", costs
    return min(costs, key=lambda name: costs[name]), costs
