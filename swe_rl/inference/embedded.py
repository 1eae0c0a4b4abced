"""The embedded engine: transformers in this process, a slot per episode, one compute thread.

    engine = EmbeddedEngine(model, EngineConfig(num_slots=32), max_context=512)
    completion = await engine.generate(prompt_ids, params, session="trajectory-7")
    await engine.update_weights(backend.weights(), version=1)
    await engine.release("trajectory-7")

Token ids in, token ids out. What one episode gets depends on its ids, its seeds and the weights, never on the others.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from swe_rl.errors import EngineDead, EngineError, InvariantError, SweRlError
from swe_rl.inference.runner import SlotRunner
from swe_rl.inference.scheduler import EngineCounters, Request, SlotScheduler
from swe_rl.models.rope import set_rope

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from swe_rl.config import EngineConfig, ModelConfig
    from swe_rl.inference.weight_update import UpdatePlan, WeightBucket
    from swe_rl.protocols import SamplingParams
    from swe_rl.types import Completion


class EmbeddedEngine:
    """Implements Policy. Takes its own copy of `model`, in `cfg.dtype`; `max_context` bounds prompt plus sampled
    tokens.

    All methods are for the event loop's thread. An async context manager; `close` ends the thread. The compute thread
    takes torch's number of threads as it is when the engine is made.
    """

    def __init__(self, model: PreTrainedModel, cfg: EngineConfig, *, max_context: int, policy_version: int = 0) -> None:
        runner = SlotRunner(
            model,
            num_slots=cfg.num_slots,
            prefill_chunk=cfg.prefill_chunk,
            max_context=max_context,
            dtype=cfg.dtype,
        )
        self._scheduler = SlotScheduler(runner, policy_version=policy_version)
        self._max_context, self._vocab_size = max_context, runner.vocab_size
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="swe-rl-engine", daemon=True)
        self._thread.start()

    @property
    def policy_version(self) -> int:
        return self._scheduler.policy_version

    @property
    def counters(self) -> EngineCounters:
        """Live counters, written by the compute thread."""
        return self._scheduler.counters

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Samples until a stop id, `max_new_tokens` or the context is full. Cancelling the task ends the request.

        Raises EngineError for a prompt that cannot be run, InvariantError for non-finite logprobs, EngineDead once
        anything else has gone wrong in the compute thread.
        """
        prompt = [int(token) for token in prompt_ids]
        self._check(prompt, params)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = Request(session, prompt, params, partial(_resolve, asyncio.get_running_loop(), future))
        self._post(partial(self._scheduler.submit, request))
        try:
            completion: Completion = await future
        except asyncio.CancelledError:
            if self._alive:
                self._post(partial(self._scheduler.cancel, request))
            raise
        return completion

    async def release(self, session: str) -> None:
        """Frees the session's slot; a running request of it ends as cancelled. Idempotent."""
        if self._alive:
            self._post(partial(self._scheduler.release, session))

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies all parameters, by Hugging Face name, between two steps; returns when they are in use.

        No key or value of the old weights is used again: idle sessions are recomputed when they come back, running
        ones at once, and their completion tells both versions. Raises EngineError for weights of another model,
        EngineDead when loading failed in the middle.
        """
        await self._between_steps(partial(self._scheduler.load_weights, weights, version))

    async def start_weight_update(self, plan: UpdatePlan) -> bool:
        """The three calls of an update in buckets: see weight_update.WeightReceiver. All policies for requests in
        flight are kept: whichever it is, they are recomputed with the new weights."""
        return bool(await self._between_steps(partial(self._scheduler.start_update, plan)))

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """The bucket's tensors must stay as they are until the update is finished."""
        await self._between_steps(partial(self._scheduler.receive, bucket))

    async def finish_weight_update(self, checksums: Mapping[str, int]) -> list[str]:
        wrong: list[str] = await self._between_steps(partial(self._scheduler.finish_update, checksums))
        return wrong

    async def set_rope(self, cfg: ModelConfig) -> None:
        """Gives the engine's model the rotary embedding of `cfg`, while no request runs; publish weights afterwards, as
        that forgets the keys of the old one. Raises ConfigError when the model cannot have it."""
        await self._between_steps(lambda: set_rope(self._scheduler.runner.model, cfg))

    async def _between_steps(self, command: Callable[[], Any]) -> Any:
        """What `command` returns or refuses (SweRlError) in the compute thread. Any other exception there ends the
        engine: what it was changing is now a mixture. Raises EngineDead then."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            if self._failure is not None:
                _resolve(loop, future, self._failure)
                return
            try:
                result = command()
            except SweRlError as err:  # refused before anything was changed
                _resolve(loop, future, err)
            except Exception as err:  # in the middle, out of memory for one
                _resolve(loop, future, _death(err))
                raise
            else:
                _resolve(loop, future, result)

        self._post(run)
        return await future

    async def rest(self) -> None:
        """Does nothing: this engine has no device of its own to leave to the trainer."""

    async def close(self) -> None:
        """Fails what still runs and ends the compute thread. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt or not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise EngineError(f"prompt of {len(prompt)} ids must be non-empty, with ids in [0, {self._vocab_size})")
        if len(prompt) >= self._max_context:
            raise EngineError(f"prompt of {len(prompt)} ids leaves no room in a context of {self._max_context}")
        if params.temperature < 0 or params.max_new_tokens < 1:
            raise EngineError("temperature must be >= 0 and max_new_tokens >= 1")

    @property
    def _alive(self) -> bool:
        return not self._closed and self._failure is None

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._closed:
                raise EngineError("the engine is closed")
            if self._failure is not None:
                raise EngineDead(f"the engine has failed: {self._failure!r}") from self._failure
            self._inbox.append(command)
            self._wake.notify()

    def _work(self) -> None:
        """Compute thread: takes commands between steps, steps while there is work, sleeps otherwise."""
        with torch.inference_mode():
            while not self._closed:
                try:
                    self._drain()
                    if self._scheduler.has_work:
                        self._scheduler.step()
                except Exception as err:  # the boundary of this thread: every waiting request gets the cause
                    self._fail(err if isinstance(err, InvariantError) else _death(err))
                    return
        self._fail(EngineError("the engine was closed"))

    def _drain(self) -> None:
        with self._wake:
            while not (self._inbox or self._scheduler.has_work or self._closed):
                self._wake.wait()
        while self._inbox:  # one at a time: when one fails, those behind it are still there to be told
            self._inbox.popleft()()

    def _fail(self, error: SweRlError) -> None:
        with self._wake:
            self._failure = error
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:  # requests queued meanwhile get the error, too
            command()
        self._scheduler.fail_all(error)


def _death(err: Exception) -> EngineDead:
    error = EngineDead(f"the engine has failed: {err!r}")
    error.__cause__ = err
    return error


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any) -> None:
    """Hands a result or exception to the event loop; a cancelled future or a closed loop no longer wants it."""

    def settle() -> None:
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
