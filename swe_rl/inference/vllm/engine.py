"""The vLLM engine: one Policy over one or more replicas that may die, hang and come back.

    async with VllmEngine(replicas, cfg.engine, contract=contract, store=store) as engine:
        await engine.update_weights(backend.weights(), version=0)
        completion = await engine.generate(prompt_ids, params, session="trajectory-7")

A session stays with one replica, where its prefix is cached. When a replica is lost, what its turns have sampled so far
is kept, with its logprobs and versions, and the rest is asked of another one: no sample is lost and none is invented.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from swe_rl.errors import EngineDead, EngineError
from swe_rl.inference.vllm.replica import Replica, ReplicaLost
from swe_rl.inference.vllm.requests import ReplicaChunk
from swe_rl.inference.vllm.router import Router
from swe_rl.inference.vllm.store import WeightStore
from swe_rl.inference.vllm.turn import TurnProgress
from swe_rl.inference.weight_update import UpdatePlan, WeightBucket, WeightInbox
from swe_rl.models.contract import PolicyContract

if TYPE_CHECKING:
    from torch import Tensor

    from swe_rl.config import EngineConfig, ModelConfig
    from swe_rl.protocols import SamplingParams
    from swe_rl.types import Completion

log = logging.getLogger(__name__)

START_TRIES = 3  # in a row, after which a replica is given up
RETRY_S = 2.0  # before the second of them, twice as long before the third
WATCH_S = 1.0  # between two looks at a replica that says nothing


@dataclass(slots=True)
class VllmCounters:
    """Since the engine was made."""

    tokens_sampled: int = 0
    tokens_prompt: int = 0
    tokens_cached: int = 0  # of the prompts, taken from the prefix cache
    tokens_reusable: int = 0  # of the prompts, computed before for the same session and version
    requests: int = 0
    resubmitted: int = 0  # parts of turns asked of a replica again, from their token prefix
    restarts: int = 0  # of replicas that were lost
    stalls: int = 0  # of them, because they made no progress
    escapes: int = 0  # sessions that left a busy replica, and with it their cached prefix
    weight_updates: int = 0
    stale_replicas: int = 0  # answers by older weights than the published ones: their tokens are dropped

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class VllmEngine:
    """Implements Policy, inference.base.Engine and weight_update.WeightReceiver. All methods are for the event loop's
    thread. `refresh` is asked, at the start of a phase, whether the replicas have to be started anew for its model;
    `inbox` takes updates in buckets into the stored weights (default: as they come).
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        cfg: EngineConfig,
        *,
        contract: PolicyContract,
        store: WeightStore,
        refresh: Callable[[ModelConfig], bool] = lambda cfg: False,
        inbox: WeightInbox | None = None,
    ) -> None:
        self.replicas, self.contract = list(replicas), contract
        self.counters = VllmCounters()
        self.policy_version = -1  # none has been published
        self._cfg, self._store, self._refresh = cfg, store, refresh
        self._inbox = inbox or WeightInbox(store.targets)
        self._plan: UpdatePlan | None = None  # of an update that has been started
        self._router = Router(len(self.replicas), cfg.max_skew)
        self._turns: dict[str, TurnProgress] = {}
        self._known: dict[str, tuple[int, list[int]]] = {}  # session -> version and ids that were computed for it
        self._progress = [0.0] * len(self.replicas)  # when each last said something
        self._restarting: dict[int, asyncio.Task[None]] = {}
        self._given_up: dict[int, EngineError] = {}
        self._changed = asyncio.Event()  # a replica became usable, or was given up
        self._writing = asyncio.Lock()  # held while the stored weights are neither the old nor the new ones
        self._stored = -1  # their version
        self._location: dict[str, Any] = {}  # where they lie; empty before the first
        self._numbers = itertools.count()
        self._closed = False

    async def start(self) -> None:
        """Starts all replicas. Raises EngineError when one does not start; the others are closed then."""
        try:
            await _all(replica.start() for replica in self.replicas)
        except BaseException:
            await self.close()
            raise
        for index in range(len(self.replicas)):
            self._set_usable(index)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Samples until a stop id, `max_new_tokens` or the context is full. Cancelling the task ends the request.

        Raises EngineError for a prompt that cannot be run, InvariantError for logprobs that are not finite, EngineDead
        when every replica was given up.
        """
        prompt = [int(token) for token in prompt_ids]
        self._check(prompt, params, session)
        room = self.contract.max_context - len(prompt)
        turn = TurnProgress(session, prompt, params, limit=min(params.max_new_tokens, room))
        self._turns[session] = turn
        try:
            while not turn.finish_reason:
                await self._run_somewhere(turn)
        finally:
            del self._turns[session]
        self._count(turn)
        return turn.completion(version=self.policy_version)

    async def release(self, session: str) -> None:
        """The episode is over; a running request of it ends as cancelled. Idempotent."""
        self._router.forget(session)
        self._known.pop(session, None)
        turn = self._turns.get(session)
        if turn is not None and not turn.released:
            turn.released = True
            await _all(replica.abort(turn.request_id) for i, replica in self._usable() if turn.request_id)

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Gives every replica all weights in one call; returns when they are in use. By default turns under way
        stand still only while the replicas load. Raises EngineError for weights of another model."""
        await self._begin_writing()
        try:
            await self._hold_up(self._cfg.in_flight)
            checksums = await asyncio.to_thread(self._store.copy, weights)
            self._inbox.forget()
            await self._switch(version, checksums)
        finally:
            self._writing.release()

    async def start_weight_update(self, plan: UpdatePlan) -> bool:
        """The three calls of an update in buckets, see weight_update.WeightReceiver. An aborted turn does not end: it
        is asked anew from the tokens that it has."""
        await self._begin_writing()
        started = False
        try:
            started = self._inbox.start(plan)
            if started:
                await self._hold_up(self._cfg.in_flight if plan.in_flight == "keep" else plan.in_flight)
            self._plan = plan if started else None
        finally:
            if not started:
                self._writing.release()
        return started

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """Copies the bucket into the stored weights."""
        await asyncio.to_thread(self._inbox.receive, bucket)

    async def finish_weight_update(self, checksums: Mapping[str, int]) -> list[str]:
        """[] when the replicas use the new version; else names whose bits are wrong, and nothing is sampled."""
        plan, self._plan = self._plan, None
        if plan is None:
            raise EngineError("a weight update was finished that was not started")
        try:
            wrong = await asyncio.to_thread(self._inbox.finish, checksums)
            if wrong:
                self._location = {}
                await self._pause(abort=False)
            else:
                held = await asyncio.to_thread(self._inbox.checksums, checksums)
                await self._switch(plan.version, held)
        finally:
            self._writing.release()
        return wrong

    async def set_rope(self, cfg: ModelConfig) -> None:
        """Starts the replicas anew when the rotary embedding of the model that trainer and engine share has changed."""
        if self._refresh(cfg):
            await self._stop_restarts()
            await _all(replica.close() for replica in self.replicas)
            self._router.usable = [False] * len(self.replicas)
            await _all(self._bring_up(index) for index in range(len(self.replicas)))

    async def rest(self) -> None:
        """Leaves the devices to the trainer; the next `update_weights` takes them back. No turn may be under way."""
        await _all(replica.sleep(2) for _, replica in self._usable())

    async def close(self) -> None:
        """Ends the replicas and removes the weights. Idempotent."""
        self._closed = True
        await self._stop_restarts()
        self._router.usable = [False] * len(self.replicas)
        self._changed.set()
        await asyncio.gather(*(replica.close() for replica in self.replicas), return_exceptions=True)
        self._store.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _check(self, prompt: list[int], params: SamplingParams, session: str) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self.policy_version < 0:
            raise EngineError("no weights have been published to the engine yet: call update_weights first")
        if not prompt or not 0 <= min(prompt) <= max(prompt) < self.contract.vocab_size:
            raise EngineError(
                f"prompt of {len(prompt)} ids must be non-empty, with ids in [0, {self.contract.vocab_size})"
            )
        if len(prompt) >= self.contract.max_context:
            raise EngineError(f"prompt of {len(prompt)} ids leaves no room in a context of {self.contract.max_context}")
        if params.temperature < 0 or params.max_new_tokens < 1:
            raise EngineError("temperature must be >= 0 and max_new_tokens >= 1")
        if session in self._turns:
            raise EngineError(f"session {session!r} already has a request running")

    async def _begin_writing(self) -> None:
        """Takes the stored weights for an update; one that was started and not finished is forgotten."""
        if self._plan is not None:
            self._plan = None
            self._writing.release()
        await self._writing.acquire()

    async def _hold_up(self, in_flight: str) -> None:
        """What turns under way do from the start of an update on; see EngineConfig.in_flight."""
        if in_flight != "keep":
            await self._pause(abort=in_flight == "abort")

    async def _pause(self, *, abort: bool) -> None:
        for index, replica in self._usable():
            try:
                await replica.pause(abort=abort)
            except ReplicaLost as err:
                self._replace(index, err)

    async def _switch(self, version: int, checksums: Mapping[str, int]) -> None:
        """The stored weights are `version` now: into every replica that runs. The others load them when they start."""
        self._location, self._stored = self._store.location(checksums, version=version), version
        await _all(self._load(index) for index, _ in self._usable())
        self.policy_version = version
        self.counters.weight_updates += 1

    async def _run_somewhere(self, turn: TurnProgress) -> None:
        """One part of a turn on one replica: to its end, or until the replica is lost."""
        index = await self._take(turn.session)
        if turn.released:  # while its replica was lost
            self._router.give_back(index)
            turn.finish_reason = "cancelled"
            return
        self.counters.resubmitted += turn.parts > 0
        try:
            await self._run(turn, index)
        except ReplicaLost as err:
            self._replace(index, err)
        finally:
            self._router.give_back(index)

    async def _run(self, turn: TurnProgress, index: int) -> None:
        version = self.policy_version
        request = turn.next_request(f"{turn.session}/{next(self._numbers)}", version=version)
        self.counters.requests += 1
        if self._router.running[index] == 1:
            self._progress[index] = time.monotonic()  # it was idle until now
        stream = self.replicas[index].stream(request)
        try:
            while (chunk := await self._next(stream, index)) is not None:
                turn.add(chunk, version=self.policy_version)
                if any(seen < version for _, seen in chunk.spans):
                    turn.drop_part()
                    self.counters.stale_replicas += 1
                    seen = min(seen for _, seen in chunk.spans)
                    raise ReplicaLost(f"it has version {seen} of the weights, not {version}: it was started anew")
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def _next(self, stream: AsyncIterator[ReplicaChunk], index: int) -> ReplicaChunk | None:
        """The next chunk, None at the end. Raises ReplicaLost when the whole replica makes no progress."""
        waiting = asyncio.ensure_future(_anext(stream))
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=WATCH_S)
                if done:
                    self._progress[index] = time.monotonic()
                    return waiting.result()
                if not self._router.usable[index]:
                    raise ReplicaLost(f"{self.replicas[index].name} is being replaced")
                if self._writing.locked() or not self._location:  # held up by an update, or by one that failed
                    self._progress[index] = time.monotonic()
                silent_s = time.monotonic() - self._progress[index]
                if silent_s > self._cfg.stall_s:
                    self.counters.stalls += 1
                    raise ReplicaLost(f"{self.replicas[index].name} has said nothing for {silent_s:.0f} s")
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting})

    async def _take(self, session: str) -> int:
        """A place at a replica. Waits while all are being started anew. Raises EngineDead when none will come back."""
        while (index := self._router.take(session)) is None:
            if self._closed:
                raise EngineError("the engine was closed")
            if len(self._given_up) == len(self.replicas):
                raise EngineDead(f"no replica is left: {next(iter(self._given_up.values()))}")
            self._changed.clear()
            await self._changed.wait()
        self.counters.escapes = self._router.escapes
        return index

    def _usable(self) -> list[tuple[int, Replica]]:
        return [(index, replica) for index, replica in enumerate(self.replicas) if self._router.usable[index]]

    def _set_usable(self, index: int) -> None:
        self._router.usable[index] = True
        self._progress[index] = time.monotonic()
        self._changed.set()

    async def _load(self, index: int) -> None:
        """The stored weights into one replica; one that is lost meanwhile loads them when it is back."""
        replica = self.replicas[index]
        try:
            if self._cfg.layout == "colocated":
                await replica.wake()
            await replica.load(self._location, version=self._stored)
            if (found := await replica.version()) != self._stored:
                raise ReplicaLost(f"{replica.name} says it has version {found} after loading {self._stored}")
        except ReplicaLost as err:
            self._replace(index, err)

    def _replace(self, index: int, err: EngineError) -> None:
        """Ends a lost replica and starts it again in the background. Once per loss, however many turns notice."""
        if not self._router.usable[index] or self._closed:
            return
        log.warning("%s; it is started again with version %d of the weights", err, self._stored)
        self._router.usable[index] = False
        self.counters.restarts += 1
        self._restarting[index] = asyncio.create_task(self._restart(index), name=f"restart {self.replicas[index].name}")

    async def _restart(self, index: int) -> None:
        for attempt in range(START_TRIES):
            try:
                await self.replicas[index].close()
                await self._bring_up(index)
                return
            except Exception as err:  # the boundary of this task: turns wait for its end, whatever it is
                log.warning("%s could not be started again: %s", self.replicas[index].name, err)
                if attempt == START_TRIES - 1:
                    self._given_up[index] = err if isinstance(err, EngineError) else EngineError(repr(err))
                    self._changed.set()
            await asyncio.sleep(RETRY_S * (attempt + 1))

    async def _bring_up(self, index: int) -> None:
        """Starts a replica and loads the stored weights, after an update that is under way."""
        await self.replicas[index].start()
        async with self._writing:
            if self._location:
                await self.replicas[index].load(self._location, version=self._stored)
            self._set_usable(index)

    async def _stop_restarts(self) -> None:
        tasks = list(self._restarting.values())
        self._restarting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _count(self, turn: TurnProgress) -> None:
        """Counts a finished turn, and remembers what was computed for its session."""
        counters = self.counters
        counters.tokens_sampled += len(turn.token_ids)
        counters.tokens_prompt += len(turn.prompt_ids)
        counters.tokens_cached += turn.cached_tokens
        if turn.released:
            return
        version, ids = self._known.get(turn.session, (-1, []))
        if version == self.policy_version:
            counters.tokens_reusable += _common_prefix(ids, turn.prompt_ids)
        # The last sampled token was never an input of the model.
        self._known[turn.session] = (turn.version_last, [*turn.prompt_ids, *turn.token_ids[:-1]])


async def _all(calls: Any) -> None:
    """Runs all to their end, then raises the first failure: none is left running behind it."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _anext(stream: AsyncIterator[ReplicaChunk]) -> ReplicaChunk | None:
    return await anext(stream, None)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
