"""The seam between the engine and whatever runs vLLM for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from swe_rl.errors import EngineError
from swe_rl.inference.vllm.requests import ReplicaChunk, ReplicaRequest

STILL_OPEN = "a weight update is already active"  # vLLM's words: one before was neither finished nor given up
START_S = 900.0  # a large model on a cold disk, a Ray cluster whose GPUs are taken


class ReplicaLost(EngineError):
    """This replica has ended, or does not answer: what it was asked can be asked of another one."""


class ReplicaStalled(ReplicaLost):
    """It gives no token, or does not answer: as far as can be seen it hangs."""


class Replica(Protocol):
    """One copy of the model that samples: local.LocalReplica, server.ServerReplica or ray_replica.RayReplica."""

    name: str

    async def start(self) -> None:
        """Starts it and waits until it answers. Can be called again after `close`. Raises EngineError."""
        ...

    def stream(self, request: ReplicaRequest) -> AsyncIterator[ReplicaChunk]:
        """The sampled tokens as they come. Closing the iterator aborts the request. Raises ReplicaLost, or EngineError
        for a request that no replica would take."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request with what it has; does nothing when it is over."""
        ...

    async def pause(self, *, abort: bool) -> None:
        """Computes nothing until the next `load`; requests under way are ended (`abort`) or stand still."""
        ...

    async def load(self, info: Mapping[str, Any], *, version: int) -> None:
        """Loads one version of the weights in place, drops the keys and values of older ones, and goes on: requests
        under way are recomputed from their ids."""
        ...

    async def join(self, info: Mapping[str, Any]) -> None:
        """Agrees with the trainer on how weights come from its GPU; `info` is vLLM's for the transfer it was started
        with. Over NCCL it returns when the trainer has come, too."""
        ...

    async def open_update(self) -> None:
        """The first of the calls that `load` consists of: computes nothing, and expects weights."""
        ...

    async def update(self, info: Mapping[str, Any]) -> None:
        """Takes some tensors, or all of them; any number of times."""
        ...

    async def close_update(self, *, version: int) -> None:
        """Goes on with the weights that it has got, as after `load`."""
        ...

    async def abandon_update(self) -> None:
        """In place of close_update: expects no more weights, and stands still until others come."""
        ...

    async def version(self) -> int:
        """The version of the weights that it says it has; -1 before the first."""
        ...

    async def sleep(self, level: int) -> None:
        """Frees the device: 1 keeps the weights in host memory, 2 drops them."""
        ...

    async def wake(self, tags: list[str] | None = None) -> None:
        """Takes the device back: all of it, or "weights" or "kv_cache" alone."""
        ...

    async def alive(self) -> bool:
        """Whether the process that is asked for tokens answers. The answer does not wait for a step of the engine."""
        ...

    async def close(self) -> None:
        """Ends what `start` began. Idempotent."""
        ...
