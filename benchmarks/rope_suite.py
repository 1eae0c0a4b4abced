"""The section `rope` of gpu_suite.py: the kernel against fp64, repeats, and its speed beside transformers' passes.

A copy of the same bytes is the roofline. At 131,072 tokens over 8 GPUs of context parallelism a layer of a 32B model
has 16,384 tokens, 64 query heads and 8 key heads: 0.6 GB to move, 0.18 ms at 3.35 TB/s.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from bench_rope import COPY, PROVIDERS, RopeCase, RopeInputs, copy, error_of, ours
from measure import interleaved

if TYPE_CHECKING:
    from gpu_suite import Suite

LAYER = (16384, 64, 8, 128)  # tokens, query heads, key heads, head dim
ODD = (1031, 5, 1, 96)
LIMITS = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # one rounding of the result
LAYER_LIMIT_MS = 0.30  # forward, bf16, H100 or H200
REPEATS = 15


def differing_repeats(case: RopeCase, repeats: int) -> float:
    """How many of `repeats` steps are not bitwise equal to the first."""
    inputs = RopeInputs(case)
    first = ours(inputs)
    pairs = [zip(ours(inputs), first, strict=True) for _ in range(repeats)]
    return float(sum(not all(torch.equal(a, b) for a, b in pair) for pair in pairs))


def rope_section(suite: Suite) -> None:
    """Errors first, then times of all providers in alternation."""
    for sizes in (LAYER, ODD):
        for dtype, limit in LIMITS.items():
            case = RopeCase(*sizes, "forward", dtype, "cuda")
            check = functools.partial(_error, case)
            suite.measure(f"rope T={sizes[0]} D={sizes[3]} {dtype} against fp64", "", check, limit=limit)
    case = RopeCase(*ODD, "forward_backward", "bfloat16", "cuda")
    suite.measure("rope repeats that differ, of 20", "", functools.partial(differing_repeats, case, 20), limit=0)
    for mode in ("forward", "forward_backward"):
        _speed(suite, RopeCase(*LAYER, mode, "bfloat16", "cuda"))


def _error(case: RopeCase) -> float:
    return error_of(RopeInputs(case), "ours")


def _speed(suite: Suite, case: RopeCase) -> None:
    limit = LAYER_LIMIT_MS if case.mode == "forward" else None
    names = [name for name in PROVIDERS if name != "reference"]
    if reason := suite.obstacle():
        for name in (*names, COPY):
            suite.skip(f"rope {case.mode} {name} time", "ms", reason, limit=limit if name == "ours" else None)
        return
    inputs = RopeInputs(case)
    steps = {name: functools.partial(PROVIDERS[name], inputs) for name in names}
    times = interleaved({**steps, COPY: functools.partial(copy, inputs)}, REPEATS, device="cuda")
    for name, found in times.items():
        p50 = found.quantile(0.5)
        detail = f"gb_per_s={case.bytes_moved / p50 / 1e9:.0f} ratio_to_ours={found.median_ratio_to(times['ours']):.2f}"
        suite.record(
            f"rope {case.mode} {name} time", "ms", 1000 * p50, limit=limit if name == "ours" else None, detail=detail
        )
