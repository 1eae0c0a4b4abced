"""From the trainer to the engines: one version of the weights at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from swe_rl.protocols import TrainerBackend
from swe_rl.training import mesh


class WeightReceiver(Protocol):
    """An engine that can be told new weights; every token it samples afterwards carries `version`."""

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies what it needs before it returns: the trainer changes these tensors in its next step."""
        ...


async def publish(backend: TrainerBackend, engine: WeightReceiver, *, version: int | None = None) -> int:
    """Gives the engine of this rank the trainer's current full weights and returns their version.

    `version` defaults to backend.policy_version. Collective: under torchrun every rank publishes to its own engine.
    """
    published = backend.policy_version if version is None else version
    await engine.update_weights(await mesh.in_thread(backend.weights), published)
    return published
