"""MergingInbox: adapters in, whole weights out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swe_rl.inference.adapter_inbox import MergingInbox
from swe_rl.inference.weight_update import UpdatePlan, WeightBucket, WeightPiece
from swe_rl.models.adapters import adapt, adapted_layers
from swe_rl.ops import weight_delta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_follow_the_adapters(model: Any, dtype: torch.dtype) -> None:
    adapt(model, rank=2, alpha=3.0)
    own = dict(model.named_parameters())
    adapters = {name: p.detach().clone() for name, p in own.items() if "lora" in name}
    merged = {name: torch.zeros(p.shape, dtype=dtype) for name, p in own.items() if "lora" not in name}
    inbox = MergingInbox(model, merged)
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        sent: dict[str, Tensor] = {}
        for name, tensor in adapters.items():
            sent[name] = torch.randn(tensor.shape, generator=generator).to(dtype)
        plan = UpdatePlan(
            version=step,
            base_version=None,
            stream="s",
            dtype=str(dtype)[6:],
            shapes={name: tuple(tensor.shape) for name, tensor in sent.items()},
        )
        assert inbox.start(plan)
        pieces = (WeightPiece(name=name, first=0, values=tensor.reshape(-1)) for name, tensor in sent.items())
        inbox.receive(WeightBucket(tuple(pieces)))
        sums = {name: weight_delta.checksum(tensor) for name, tensor in sent.items()}
        assert inbox.finish({**sums, next(iter(sums)): 1}) == [next(iter(sums))]
        assert inbox.start(plan)
        assert inbox.finish(sums) == []
        layers = dict(adapted_layers(model))
        for name, tensor in merged.items():
            layer = layers.get(name.removesuffix(".weight"))
            want = own[name].detach().double()
            if layer is not None:
                a, b = (sent[f"{name.removesuffix('.weight')}.{kind}"].double() for kind in ("lora_a", "lora_b"))
                want = want + 1.5 * b @ a
            torch.testing.assert_close(tensor.double(), want, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-5)
        assert inbox.checksums(sums) == {name: weight_delta.checksum(tensor) for name, tensor in merged.items()}
