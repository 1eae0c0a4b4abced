"""The probe's two bounds: rounding may be as large as it is measured to be, but it has no sign."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from swe_rl.models.contract import PolicyContract
from swe_rl.training.parity import compare
from swe_rl.types import Completion, PackedBatch, StopReason, Trajectory, Turn

TOKENS = 8


def contract(dtype: str) -> PolicyContract:
    return PolicyContract(
        vocab_size=50,
        stop_ids=(7,),
        temperature=1.0,
        max_context=64,
        trainer_dtype=dtype,
        engine_dtype=dtype,
        rope={},
    )


def played() -> list[Trajectory]:
    found = []
    for name in ("short", "middle", "long"):
        completion = Completion(
            token_ids=list(range(10, 10 + TOKENS)),
            rollout_logprobs=[-0.25 * (i + 1) for i in range(TOKENS)],
            finish_reason="length",
            policy_version=0,
            policy_version_max=0,
        )
        found.append(
            Trajectory(
                trajectory_id=f"parity/{name}/fixed/1",
                task_id="parity",
                group_id="parity",
                rollout_index=0,
                turns=[Turn(context_ids=[1, 2, 3], completion=completion, tool_call=None, observation="")],
                stop_reason=StopReason.MAX_TURNS,
                temperature=1.0,
            )
        )
    return found


def off_by(difference: Callable[[int], float]) -> Callable[[Sequence[PackedBatch]], list[Tensor]]:
    """A trainer whose logprob of token i is the engine's plus `difference(i)`."""

    def score(batches: Sequence[PackedBatch]) -> list[Tensor]:
        noise = torch.tensor([difference(i) for i in range(len(batches[0].labels))])
        return [batch.rollout_logprobs + noise for batch in batches]

    return score


@pytest.mark.parametrize(
    ("dtype", "difference", "ok"),
    [
        ("bfloat16", lambda i: 0.05 * (-1) ** i, True),
        ("bfloat16", lambda i: 0.07 * (-1) ** i, False),  # more than rounding
        ("bfloat16", lambda i: 0.015, True),
        ("bfloat16", lambda i: -0.03, False),  # small, and all in one direction
        ("float32", lambda i: 9e-4 * (-1) ** i, True),
        ("float32", lambda i: 2e-3 * (-1) ** i, False),
    ],
)
def test_size_and_sign_are_bounded_apart(dtype: str, difference: Callable[[int], float], ok: bool) -> None:
    report = compare(played(), contract(dtype), score=off_by(difference))
    values = [difference(i) for i in range(2, 2 + TOKENS)]  # label t stands at t - 1: three ids of context
    assert report.bias == pytest.approx(sum(values) / TOKENS, abs=1e-6)
    assert report.means["long"] == pytest.approx(sum(map(abs, values)) / TOKENS, abs=1e-6)
    assert report.ok is ok
    assert f"bound {0.06 if dtype == 'bfloat16' else 0.001:g}; with its sign" in report.describe()
