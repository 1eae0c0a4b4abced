"""A replica in a Ray actor, on whichever node of the cluster has the GPUs for it.

The files of the weights (settings.WeightStore) must be readable there: Ray on this machine, or temporary files on a
shared file system.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from swe_rl.errors import EngineError
from swe_rl.inference.vllm.local import LocalReplica
from swe_rl.inference.vllm.replica import ReplicaLost
from swe_rl.inference.vllm.requests import ReplicaChunk, ReplicaRequest

MAX_CALLS = 10_000  # of an actor at a time
CLOSE_S = 30.0  # for its engine to end


class ReplicaActor:
    """Runs in the actor: a LocalReplica whose methods are called from elsewhere."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        self._replica = LocalReplica(name, args)

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await getattr(self._replica, method)(*arguments, **options)

    async def stream(self, request: ReplicaRequest) -> AsyncIterator[ReplicaChunk]:
        async for chunk in self._replica.stream(request):
            yield chunk

    async def process_ids(self) -> list[int]:
        import os

        return [os.getpid(), *self._replica.process_ids]


class RayReplica:
    """Implements Replica. `args` are keyword arguments of vLLM's AsyncEngineArgs; `num_gpus` are reserved for it.

    Needs a connection (ray_connection) before `start`. The actor's engine ends with the actor (owner.py).
    """

    def __init__(self, name: str, args: Mapping[str, Any], *, num_gpus: int) -> None:
        self.name, self._args, self._num_gpus = name, dict(args), num_gpus
        self._actor: Any = None

    async def start(self) -> None:
        """Makes the actor and waits until its engine answers. Raises EngineError."""
        import ray

        options = {"num_cpus": 0, "num_gpus": self._num_gpus, "max_concurrency": MAX_CALLS, "max_restarts": 0}
        self._actor = ray.remote(ReplicaActor).options(**options).remote(self.name, self._args)
        await self._call("start")

    async def process_ids(self) -> list[int]:
        """Of the actor and its engine, for tests that end them."""
        found: list[int] = await self._actor.process_ids.remote()
        return found

    async def stream(self, request: ReplicaRequest) -> AsyncIterator[ReplicaChunk]:
        """The sampled tokens as they come. Closing the iterator aborts the request. Raises ReplicaLost."""
        import ray
        from ray.exceptions import RayError

        if self._actor is None:
            raise ReplicaLost(f"{self.name} is closed")
        finished = False
        chunks = self._actor.stream.options(num_returns="streaming").remote(request)
        try:
            async for reference in chunks:
                chunk: ReplicaChunk = await reference
                finished = chunk.finish_reason is not None
                yield chunk
        except RayError as err:
            raise _translated(err, self.name) from err
        finally:
            if not finished:
                ray.cancel(chunks)

    async def abort(self, request_id: str) -> None:
        """Ends a request with what it has; does nothing when it is over."""
        await self._call("abort", request_id)

    async def pause(self, *, abort: bool) -> None:
        """Computes nothing until the next `load`; requests under way are ended or stand still."""
        await self._call("pause", abort=abort)

    async def load(self, info: Mapping[str, Any], *, version: int) -> None:
        """Loads one version of the weights while nothing is computed, and goes on."""
        await self._call("load", dict(info), version=version)

    async def join(self, info: Mapping[str, Any]) -> None:
        """Agrees with the trainer on how weights come from its GPU."""
        await self._call("join", dict(info))

    async def open_update(self) -> None:
        """Computes nothing, and expects weights."""
        await self._call("open_update")

    async def update(self, info: Mapping[str, Any]) -> None:
        """Takes some tensors, or all of them."""
        await self._call("update", dict(info))

    async def close_update(self, *, version: int) -> None:
        """Goes on with the weights that it has got, which are `version`."""
        await self._call("close_update", version=version)

    async def abandon_update(self) -> None:
        """Expects no more weights, and stands still until others come."""
        await self._call("abandon_update")

    async def version(self) -> int:
        """The version that the engine says it has; -1 before the first one."""
        return int(await self._call("version"))

    async def sleep(self, level: int) -> None:
        """Frees the device: 1 keeps the weights in host memory, 2 drops them."""
        await self._call("sleep", level)

    async def wake(self, tags: list[str] | None = None) -> None:
        """Takes the device memory back, all or only "weights" or "kv_cache"."""
        await self._call("wake", tags)

    async def alive(self) -> bool:
        """Whether it answers."""
        try:
            return bool(await self._call("alive"))
        except EngineError:
            return False

    async def close(self) -> None:
        """Ends the engine, then the actor. Idempotent."""
        import ray

        actor, self._actor = self._actor, None
        if actor is not None:
            try:
                await asyncio.wait_for(actor.call.remote("close"), CLOSE_S)
            except (ray.exceptions.RayError, TimeoutError):
                pass  # it has ended already, hangs, or waits for a place on the cluster
            finally:
                ray.kill(actor, no_restart=True)

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        from ray.exceptions import RayError

        if self._actor is None:
            raise ReplicaLost(f"{self.name} is closed")
        try:
            return await self._actor.call.remote(method, *arguments, **options)
        except RayError as err:
            raise _translated(err, self.name) from err


def node_address() -> str:
    """Of this node, as the others of the cluster know it."""
    import ray

    return str(ray.util.get_node_ip_address())


def _translated(err: Any, name: str) -> EngineError:
    """What the replica raised in its actor; anything else is the loss of the actor."""
    cause = getattr(err, "cause", None)
    return cause if isinstance(cause, EngineError) else ReplicaLost(f"{name}: {' '.join(str(err).split())[:300]}")
