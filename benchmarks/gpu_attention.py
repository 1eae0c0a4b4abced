"""The attention part of the GPU suite: TFLOP/s from 4k to 131k tokens, ours beside FlashAttention, torch and Flex.

Targets on H100 with head_dim 128 in bf16, of one long causal document: our kernels at least 450 TFLOP/s forward and 300
backward, and the choice of the cost model at least 95 % as fast as the best that is present.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic
from attention_providers import PROVIDERS, CannotRun, run_provider
from attention_shapes import AttentionCase, make_inputs
from measure import Times, interleaved

TOKENS = (4096, 8192, 16384, 32768, 65536, 131072)
HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
FORWARD_TFLOPS, BACKWARD_TFLOPS = 450.0, 300.0
TARGET_TOKENS = 16384  # from here on the targets hold
DISPATCH_SHARE = 0.95
REPEATS = 9
NO_RIVALS = ("ours", "ours_triton_fast", "flex")  # the choice itself, and who adds up in any order
SECONDS_A_SIZE = 45.0  # rough need of the largest size, checked before it is begun
CAUSAL_ONLY = ("sdpa_per_document", "sdpa_repeated_keys", "sdpa_mask")  # left out: the kernels behind them are listed


def attention_section(suite: Any) -> None:
    """Documents at every size, then packed documents and a tree at one."""
    with _fixed_order():
        for tokens in TOKENS:
            _compare(suite, tokens, "document")
        for mask in ("documents", "tree"):
            _compare(suite, 32768, mask)


@contextmanager
def _fixed_order() -> Iterator[None]:
    """torch's flag for the process, which its kernel needs to be a choice. What torch would do to new tensors for the
    sake of the flag is left out: filling them costs time."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def _compare(suite: Any, tokens: int, mask: str) -> None:
    label = f"{mask} T={tokens}"
    names = [name for name in PROVIDERS if name not in CAUSAL_ONLY]
    if reason := suite.obstacle() or ("" if suite.left > SECONDS_A_SIZE * tokens / TOKENS[-1] else "out of time"):
        for name in names:
            for part in ("forward", "backward"):
                suite.skip(f"{label} {name} {part}", "ms", reason, limit=None)
        return
    spent: dict[str, dict[str, Times]] = {}
    for mode in ("forward", "forward_backward"):
        case = AttentionCase(tokens, HEADS, KEY_HEADS, HEAD_DIM, mask, mode, "bfloat16", "cuda")
        spent[mode] = _times(suite, case, names, label)
    flops = AttentionCase(tokens, HEADS, KEY_HEADS, HEAD_DIM, mode="forward").flops(_pairs(tokens, mask))
    for name in spent["forward_backward"]:
        if name in spent["forward"]:
            _record(suite, label, name, spent, flops, targets=mask == "document" and tokens >= TARGET_TOKENS)
    _record_choice(suite, label, spent["forward_backward"])


def _pairs(tokens: int, mask: str) -> float:
    return make_inputs(AttentionCase(tokens, 1, 1, 16, mask, "forward")).pairs


def _times(suite: Any, case: AttentionCase, names: list[str], label: str) -> dict[str, Times]:
    inputs = make_inputs(case)
    steps: dict[str, Callable[[], object]] = {}
    for name in names:
        try:
            run_provider(name, inputs)
        except CannotRun as error:
            suite.skip(f"{label} {name} {case.mode}", "ms", str(error))
            continue
        except Exception as error:
            suite.failed |= name.startswith("ours")
            suite.skip(f"{label} {name} {case.mode}", "ms", f"failed: {type(error).__name__}: {error}".splitlines()[0])
            continue
        steps[name] = functools.partial(run_provider, name, inputs)
    return interleaved(steps, REPEATS, device="cuda")


def _record(
    suite: Any, label: str, name: str, spent: dict[str, dict[str, Times]], flops: float, *, targets: bool
) -> None:
    """Forward, and backward as the difference to both together, whose products are 2.5 times as many."""
    forward = spent["forward"][name].quantile(0.5)
    backward = spent["forward_backward"][name].quantile(0.5) - forward
    parts = {"forward": (forward, flops, FORWARD_TFLOPS), "backward": (backward, 2.5 * flops, BACKWARD_TFLOPS)}
    for part, (seconds, count, target) in parts.items():
        limit = 1000 * count / target / 1e12 if targets and name == "ours_triton" else None
        detail = f"TFLOP/s={count / max(seconds, 1e-9) / 1e12:.0f}"
        suite.record(f"{label} {name} {part}", "ms", 1000 * seconds, limit=limit, detail=detail)


def _record_choice(suite: Any, label: str, times: dict[str, Times]) -> None:
    """How much slower the cost model's choice is than the fastest that promises the same bits every time."""
    others = {name: found.quantile(0.5) for name, found in times.items() if name not in NO_RIVALS}
    if "ours" not in times or not others:
        return
    best = min(others, key=lambda name: others[name])
    ratio = times["ours"].quantile(0.5) / others[best]
    suite.record(f"{label} choice / best", "", ratio, limit=1 / DISPATCH_SHARE, detail=f"best={best}")
