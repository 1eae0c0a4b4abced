"""A replica in a child process of this one: vLLM's AsyncLLM, driven by its own calls."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from swe_rl.errors import EngineError
from swe_rl.inference.daemon_threads import in_daemon_thread
from swe_rl.inference.vllm.cpu_experts import RETURN_EXPERTS, pass_the_check
from swe_rl.inference.vllm.devices import VISIBLE, visible_devices
from swe_rl.inference.vllm.owner import name_owner
from swe_rl.inference.vllm.replica import STILL_OPEN, ReplicaLost
from swe_rl.inference.vllm.requests import ReplicaChunk, ReplicaRequest, sampled_logprobs

# vLLM's own defaults that a trainer does not want: a fork of a process with threads, usage statistics over the network,
# a line per request. Values that are set already are kept.
ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines and the trainer share the processors
}
# Set in this process for its trainer (Megatron's order of sends and products): an engine has no such order to keep, and
# one queue would make its copies wait for its products.
TRAINERS_OWN = ("CUDA_DEVICE_MAX_CONNECTIONS",)

T = TypeVar("T")

CLOSE_S = 5.0  # for the engine's processes to end by themselves
_STARTING = threading.Lock()


def prepare_environment(environment: MutableMapping[str, str], *, gpus: list[int]) -> None:
    """What an engine process of ours needs in its environment; `gpus` are those it is to see, [] leaves that open."""
    for key, value in ENVIRONMENT.items():
        environment.setdefault(key, value)
    for key in TRAINERS_OWN:
        environment.pop(key, None)
    name_owner(environment)
    if gpus:
        environment[VISIBLE] = visible_devices(gpus)


class LocalReplica:
    """Implements Replica. `args` are keyword arguments of vLLM's AsyncEngineArgs; `gpus` see devices.py."""

    def __init__(self, name: str, args: Mapping[str, Any], *, gpus: Sequence[int] = ()) -> None:
        self.name, self._args, self._gpus = name, dict(args), list(gpus)
        self._llm: Any = None

    async def start(self) -> None:
        """Starts the engine's process and waits until it answers (tens of seconds). Raises EngineError."""
        unwanted = threading.Event()
        try:
            self._llm = await in_daemon_thread(self._make, unwanted)
        except asyncio.CancelledError:  # the thread goes on
            unwanted.set()
            raise
        except Exception as err:  # whatever stops a start: memory, a model that vLLM does not know, a bad argument
            raise EngineError(f"vLLM did not start: {' '.join(str(err).split())[:500]}") from err

    def _make(self, unwanted: threading.Event) -> Any:
        """The engine's processes take over this process's environment, so one is started at a time; what vLLM and this
        put there (LD_PRELOAD among it) is not for the processes that this one starts later. `unwanted`: this start was
        cancelled, so nobody else ends what it made."""
        with _STARTING:
            before = dict(os.environ)
            prepare_environment(os.environ, gpus=self._gpus)
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            try:
                if self._args.get(RETURN_EXPERTS):
                    pass_the_check()
                llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._args))
                if unwanted.is_set():
                    llm.shutdown(CLOSE_S)
                return llm
            finally:
                for name in os.environ.keys() - before.keys():
                    del os.environ[name]
                os.environ.update(before)

    @property
    def process_ids(self) -> list[int]:
        """Of the engine's processes, for tests that end them."""
        manager = self._llm.engine_core.resources.engine_manager
        return [process.pid for process in manager.processes] if manager is not None else []

    async def stream(self, request: ReplicaRequest) -> AsyncIterator[ReplicaChunk]:
        """The sampled tokens as they come. Closing the iterator aborts the request. Raises ReplicaLost."""
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(**request.sampling, output_kind=RequestOutputKind.DELTA)
        prompt = TokensPrompt(prompt_token_ids=request.prompt_ids, cache_salt=request.cache_salt)
        if (llm := self._llm) is None:
            raise ReplicaLost(f"{self.name} is closed")
        outputs = llm.generate(prompt, params, request.request_id)
        try:
            async for output in outputs:
                yield _chunk(output)
        except (EngineError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as err:
            raise self._lost(llm, err) from err
        finally:
            await outputs.aclose()

    async def abort(self, request_id: str) -> None:
        """Ends a request with what it has; does nothing when it is over."""
        llm = self._llm
        if llm is not None and not llm.errored:
            await self._told(llm, lambda llm: llm.abort(request_id))

    async def pause(self, *, abort: bool) -> None:
        """Computes nothing until the next `load`; requests under way are ended or stand still."""
        await self._pause(self._llm, abort=abort)

    async def load(self, info: Mapping[str, Any], *, version: int) -> None:
        """Loads one version of the weights while nothing is computed, and goes on.

        Raises ReplicaLost when the replica ended meanwhile, EngineError when the old blocks could not be dropped.
        """
        llm = self._llm  # one that is started meanwhile has heard of no update
        await self._open_update(llm)
        await self._update(llm, info)
        await self._close_update(llm, version=version)

    async def join(self, info: Mapping[str, Any]) -> None:
        """Agrees with the trainer on how weights come from its GPU."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=dict(info))
        await self._told(self._llm, lambda llm: llm.init_weight_transfer_engine(request))

    async def open_update(self) -> None:
        """Computes nothing, and expects weights."""
        await self._open_update(self._llm)

    async def update(self, info: Mapping[str, Any]) -> None:
        """Takes some tensors, or all of them."""
        await self._update(self._llm, info)

    async def close_update(self, *, version: int) -> None:
        """Goes on with the weights that it has got, which are `version`."""
        await self._close_update(self._llm, version=version)

    async def abandon_update(self) -> None:
        """Expects no more weights, and stands still until others come."""
        await self._told(self._llm, lambda llm: llm.finish_weight_update())

    async def version(self) -> int:
        """The version that the engine says it has; -1 before the first one."""
        label: str = await self._told(self._llm, lambda llm: llm.get_weight_version())
        return _version(label)

    async def sleep(self, level: int) -> None:
        """Frees the device: 1 keeps the weights in host memory, 2 drops them."""
        await self._told(self._llm, lambda llm: llm.sleep(level=level, mode="keep"))

    async def wake(self, tags: list[str] | None = None) -> None:
        """Takes the device memory back, all or only "weights" or "kv_cache"."""
        await self._told(self._llm, lambda llm: llm.wake_up(tags))

    async def alive(self) -> bool:
        """Whether its processes are there, as far as this one knows; a question would wait for the engine's step."""
        return self._llm is not None and not self._llm.errored

    async def close(self) -> None:
        """Ends the engine's processes. Idempotent. When it is cancelled the end goes on in its thread, and with the
        owner they end in any case."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await in_daemon_thread(llm.shutdown, CLOSE_S)

    async def _pause(self, llm: Any, *, abort: bool) -> None:
        mode = "abort" if abort else "keep"
        await self._told(llm, lambda llm: llm.pause_generation(mode=mode, clear_cache=False))

    async def _open_update(self, llm: Any) -> None:
        if not await self._told(llm, lambda llm: llm.is_paused()):
            await self._pause(llm, abort=False)
        try:
            await self._told(llm, lambda llm: llm.start_weight_update())
        except EngineError as err:
            if STILL_OPEN not in str(err):
                raise
            await self._told(llm, lambda llm: llm.finish_weight_update())
            await self._told(llm, lambda llm: llm.start_weight_update())

    async def _update(self, llm: Any, info: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=dict(info))
        await self._told(llm, lambda llm: llm.update_weights(request))

    async def _close_update(self, llm: Any, *, version: int) -> None:
        await self._told(llm, lambda llm: llm.finish_weight_update(str(version)))
        # With requests under way a plain reset would be refused, silently: they are recomputed from their ids.
        if not await self._told(llm, lambda llm: llm.reset_prefix_cache(reset_running_requests=True)):
            raise EngineError(f"{self.name}: the prefix cache of older weights could not be dropped")
        await self._told(llm, lambda llm: llm.resume_generation())

    async def _told(self, llm: Any, ask: Callable[[Any], Awaitable[T]]) -> T:
        """The result of a call to that start of the engine. Raises ReplicaLost, also when it was closed since, and
        EngineError."""
        if llm is None or llm is not self._llm:
            raise ReplicaLost(f"{self.name} is closed")
        try:
            return await ask(llm)
        except Exception as err:
            raise self._lost(llm, err) from err

    def _lost(self, llm: Any, err: Exception) -> EngineError:
        """A dead engine can be replaced; anything else is the fault of this one request."""
        if llm is not self._llm or llm.errored or "dead" in type(err).__name__.lower():
            return ReplicaLost(f"{self.name} has ended: {err!r}")
        return EngineError(f"{self.name}: {' '.join(repr(err).split())[:300]} {err.__cause__ or ''}")


def _chunk(output: Any) -> ReplicaChunk:
    (part,) = output.outputs
    ids = [int(token) for token in part.token_ids]
    return ReplicaChunk(
        token_ids=ids,
        logprobs=sampled_logprobs(ids, list(part.logprobs or [])),
        finish_reason=part.finish_reason,
        cached_tokens=output.num_cached_tokens or 0,
        routed_experts=getattr(part, "routed_experts", None),
        spans=[(span.start, _version(span.version)) for span in part.weight_versions or []],
    )


def _version(label: str) -> int:
    return int(label) if label.lstrip("-").isdigit() else -1
