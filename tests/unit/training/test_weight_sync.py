from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from swe_rl.training.weight_sync import publish


class Receiver:
    def __init__(self) -> None:
        self.versions: list[int] = []
        self.weights: dict[str, Tensor] = {}

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.versions.append(version)
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}


async def test_the_engine_gets_the_weights_of_each_version(
    make_backend: Callable[..., Any], make_batches: Callable[..., Any]
) -> None:
    backend, engine = make_backend(), Receiver()
    assert await publish(backend, engine) == 0
    first = engine.weights
    backend.train_step(make_batches(), learning_rate=1e-2)
    assert await publish(backend, engine) == 1
    assert await publish(backend, engine, version=41) == 41
    assert engine.versions == [0, 1, 41]
    assert first.keys() == engine.weights.keys() == dict(backend.model.named_parameters()).keys()
    assert not torch.equal(first["model.norm.weight"], engine.weights["model.norm.weight"])
