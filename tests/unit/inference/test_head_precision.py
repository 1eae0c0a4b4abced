"""The head of the engine keeps fp32 logits whatever the dtype of the body, as the trainer's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swe_rl.inference.runner import Chunk, SlotRunner
from swe_rl.models.forward import head_weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_not_rounded_and_follow_new_weights(model: Any, dtype: str) -> None:
    runner = SlotRunner(model, num_slots=2, prefill_chunk=16, max_context=64, dtype=dtype)
    kept: list[torch.Tensor] = []
    hidden_of = runner._hidden
    runner._hidden = lambda *args: kept.append(hidden_of(*args)) or kept[-1]  # type: ignore[method-assign, func-returns-value]
    new = {name: (1.5 * param.detach()).float() for name, param in model.named_parameters()}
    for update in (False, True):
        if update:
            runner.load_weights(new)
        with torch.inference_mode():
            logits, _ = runner.forward([Chunk(0, 0, [3])], [])
        weight = head_weight(runner.model).detach().double()
        want = kept[-1][: len(logits)].double() @ weight.T
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), want, rtol=1e-5, atol=1e-5)
        assert (logits != logits.bfloat16().float()).float().mean() > 0.9
