"""The CUDA code of ops.weight_delta on a real GPU against torch, bit by bit."""

from __future__ import annotations

import pytest
import torch

from swe_rl.ops import weight_delta, weight_delta_native

# The skip is repeated here for runs with --noconftest, on machines that have nothing but torch and pytest.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not weight_delta_native.available("cuda")[0], reason="not built with SWE_RL_CUDA=1"),
]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1024, 100_003, (1 << 22) + 5])
@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("start", [0, 3])  # 3: nothing lies at a multiple of 16 bytes
def test_it_agrees_with_torch(size: int, share: float, start: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(size)
    numbers = torch.randn(2, size + start, generator=generator, device="cuda").bfloat16()
    old, other = numbers[0, start:].clone(), numbers[1, start:]
    if start:
        old = numbers[0, start:]
    new = torch.where(torch.rand(size, generator=generator, device="cuda") < share, other, old).contiguous()
    mine, theirs = (weight_delta.compare(old, new, impl=impl) for impl in ("cuda", "reference"))
    for name in ("counts", "offsets", "values"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert weight_delta.checksum(new, first=9, impl="cuda") == weight_delta.checksum(new, first=9, impl="reference")
    target = old.clone()
    weight_delta.apply(target, mine, impl="cuda")
    assert torch.equal(target, new)
    weight_delta.compare(old, new, update=True, impl="cuda")
    assert torch.equal(old, new)
