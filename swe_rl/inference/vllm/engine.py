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
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from swe_rl.errors import EngineError
from swe_rl.inference.vllm import health
from swe_rl.inference.vllm.device_transfer import DeviceSender, open_sender
from swe_rl.inference.vllm.fleet import Fleet, Place, run_all
from swe_rl.inference.vllm.replica import Replica, ReplicaLost, ReplicaStalled
from swe_rl.inference.vllm.requests import ReplicaChunk
from swe_rl.inference.vllm.store import WeightStore
from swe_rl.inference.vllm.turn import TurnProgress
from swe_rl.inference.weight_update import UpdatePlan, WeightBucket, WeightInbox
from swe_rl.models.contract import PolicyContract

if TYPE_CHECKING:
    from torch import Tensor

    from swe_rl.config import EngineConfig, ModelConfig
    from swe_rl.protocols import SamplingParams
    from swe_rl.types import Completion

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
    stalls: int = 0  # of them, because they made no progress or did not answer
    escapes: int = 0  # sessions that left a busy replica, and with it their cached prefix
    weight_updates: int = 0
    stale_replicas: int = 0  # answers by older weights than the published ones: their tokens are dropped

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class VllmEngine:
    """Implements Policy, inference.base.Engine and weight_update.WeightReceiver. All methods are for the event loop's
    thread. `refresh` is asked, at the start of a phase, whether the replicas have to be started anew for its model;
    `inbox` takes updates in buckets into the stored weights (default: as they come). With cfg.weight_transfer nccl or
    ipc they also go from GPU to GPU (device_transfer.py), and the stored ones are for replicas that start later.
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
        self.fleet = Fleet(replicas, max_skew=cfg.max_skew, catch_up=self._catch_up)
        self.replicas, self.contract = self.fleet.replicas, contract
        self._counters = VllmCounters()
        self.policy_version = -1  # none has been published
        self._cfg, self._store, self._refresh = cfg, store, refresh
        self._inbox = inbox or WeightInbox(store.targets)
        self._sender: DeviceSender | None = None
        if cfg.weight_transfer != "host":
            shapes = {name: tuple(tensor.shape) for name, tensor in store.targets.items()}
            self._sender = open_sender(cfg, shapes, self.fleet)
        self._plan: UpdatePlan | None = None  # of an update that has been started
        self._turns: dict[str, TurnProgress] = {}
        self._known: dict[str, tuple[int, list[int]]] = {}  # session -> version and ids that were computed for it
        self._writing = asyncio.Lock()  # held while the stored weights are neither the old nor the new ones
        self._stored = -1  # their version
        self._location: dict[str, Any] = {}  # where they lie; empty before the first, and when they are wrong
        self._whole = asyncio.Event()  # not set: an update is half way, or left wrong bits, which nobody may load
        self._whole.set()
        self._numbers = itertools.count()
        self._closed = False

    async def start(self) -> None:
        """Starts all replicas. Raises EngineError when one does not start; the others are closed then."""
        try:
            await self.fleet.start()
        except BaseException:
            await self.close()
            raise

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Samples until a stop id, `max_new_tokens` or the context is full. Cancelling the task ends the request.

        Raises EngineError for a prompt that cannot be run, InvariantError for logprobs that are not finite, EngineDead
        when every replica was given up.
        """
        prompt = [int(token) for token in prompt_ids]
        self._check(prompt, params, session)
        room = self.contract.max_context - len(prompt)
        turn = TurnProgress(session, prompt, params, limit=min(params.max_new_tokens, room))
        if self._cfg.router_replay:  # of what this session computed before its experts are known
            turn.routing_start = _common_prefix(self._known.get(session, (-1, []))[1], prompt)
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
        self.fleet.router.forget(session)
        self._known.pop(session, None)
        turn = self._turns.get(session)
        if turn is not None and not turn.released:
            turn.released = True
            await run_all(self._abort(place, turn.request_id) for place in self.fleet.usable() if turn.request_id)

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Gives every replica all weights in one call; returns when they are in use. By default turns under way
        stand still only while the replicas load. Raises EngineError for weights of another model."""
        await self._begin_writing()
        try:
            self._store.check(weights)
            await self._hold_up(self._cfg.in_flight)
            self._whole.clear()
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
            if suits := self._inbox.start(plan):
                await self._hold_up(self._cfg.in_flight if plan.in_flight == "keep" else plan.in_flight)
                await self._open_sender()
            self._plan, started = plan if suits else None, suits
        finally:
            if not started:
                await self._end_writing()
        return started

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """Copies the bucket into the stored weights, and sends it to the replicas where GPUs do that directly."""
        if self._plan is not None:  # the stored ones are neither the old nor the new ones, should it go no further
            self._whole.clear()
        calls: list[Any] = [asyncio.to_thread(self._inbox.receive, bucket)]
        await run_all(calls if self._sender is None else [*calls, self._sender.send(bucket)])

    async def finish_weight_update(self, checksums: Mapping[str, int]) -> list[str]:
        """[] when the replicas use the new version; else names whose bits are wrong, and nothing is sampled."""
        plan, self._plan = self._plan, None
        if plan is None:
            raise EngineError("a weight update was finished that was not started")
        try:
            wrong = await asyncio.to_thread(self._inbox.finish, checksums)
            if wrong:
                self._location = {}
                self._whole.clear()
                await self._abandon_sending()
                await self._pause(abort=False)
            else:
                held = await asyncio.to_thread(self._inbox.checksums, checksums)
                await self._switch(plan.version, held)
        finally:
            await self._end_writing()
        return wrong

    async def set_rope(self, cfg: ModelConfig) -> None:
        """Starts the replicas anew when the rotary embedding of the model that trainer and engine share has changed.
        Raises EngineError after an update that left wrong bits."""
        self._check_whole()
        if self._refresh(cfg):
            await self.fleet.start_anew()

    async def rest(self) -> None:
        """Leaves the devices to the trainer; the next version of the weights takes them back. No turn may be under
        way. Raises EngineError after an update that left wrong bits, which starting replicas wait to be replaced."""
        self._check_whole()
        await self.fleet.rest()

    @property
    def counters(self) -> VllmCounters:
        """Since the engine was made."""
        self._counters.restarts, self._counters.stalls = self.fleet.restarts, self.fleet.stalls
        self._counters.escapes = self.fleet.router.escapes
        return self._counters

    async def outage_s(self) -> float:
        """As protocols.OutageClock."""
        return self.fleet.outage_s

    async def close(self) -> None:
        """Ends the replicas and removes the weights. Idempotent."""
        self._closed = True
        await self.fleet.close()
        if self._sender is not None:
            await self._sender.close()
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

    def _check_whole(self) -> None:
        if not self._whole.is_set():
            raise EngineError("the last update left the engine with wrong weights: publish all of them first")

    async def _begin_writing(self) -> None:
        """Takes the stored weights for an update; one that was started and not finished is forgotten."""
        if self._plan is None:
            await self._writing.acquire()
        self._plan = None
        try:
            await self._abandon_sending()
        except BaseException:
            self._writing.release()
            raise

    async def _end_writing(self) -> None:
        """The update is over. If it is not in use by now its receivers expect no more of it."""
        try:
            await self._abandon_sending()
        finally:
            self._writing.release()

    async def _hold_up(self, in_flight: str) -> None:
        """What turns under way do from the start of an update on; see EngineConfig.in_flight."""
        if in_flight != "keep":
            await self._pause(abort=in_flight == "abort")

    async def _open_sender(self) -> None:
        """Weights that come in place stop the turns, whatever in_flight says: there is no old copy to sample from."""
        if self._sender is None:
            return
        if self._cfg.layout == "colocated":
            await run_all(self._wake(place) for place in self.fleet.usable())
        await self._sender.start()

    async def _wake(self, place: Place) -> None:
        try:
            await health.watched(place.replica, place.replica.wake())
        except ReplicaLost as err:  # while it slept
            self.fleet.replace(place, err)

    async def _abandon_sending(self) -> None:
        if self._sender is not None:
            await self._sender.abandon()

    async def _pause(self, *, abort: bool) -> None:
        for place in self.fleet.usable():
            try:
                await health.watched(place.replica, place.replica.pause(abort=abort))
            except ReplicaLost as err:
                self.fleet.replace(place, err)

    async def _abort(self, place: Place, request_id: str) -> None:
        try:
            await health.watched(place.replica, place.replica.abort(request_id))
        except ReplicaLost as err:  # the request has ended with it
            self.fleet.replace(place, err)

    async def _switch(self, version: int, checksums: Mapping[str, int]) -> None:
        """The stored weights are `version` now: into every replica that runs. The others load them when they start."""
        self._location, self._stored = self._store.location(checksums, version=version), version
        self._whole.set()
        await run_all(self._load(place) for place in self.fleet.usable())
        self.policy_version = version
        self.fleet.wake_up()
        self.counters.weight_updates += 1

    async def _run_somewhere(self, turn: TurnProgress) -> None:
        """One part of a turn on one replica: to its end, or until the replica is lost."""
        place = await self.fleet.take(turn.session)
        if turn.released:  # while its replica was lost
            self.fleet.give_back(place)
            turn.finish_reason = "cancelled"
            return
        self.counters.resubmitted += turn.parts > 0
        try:
            await self._run(turn, place)
        except ReplicaLost as err:
            self.fleet.replace(place, err)
        finally:
            self.fleet.give_back(place)

    async def _run(self, turn: TurnProgress, place: Place) -> None:
        version = self.policy_version
        request = turn.next_request(f"{turn.session}/{next(self._numbers)}", version=version)
        self.counters.requests += 1
        stream = place.replica.stream(request)
        try:
            while (chunk := await self._next(stream, place)) is not None:
                turn.add(chunk, version=self.policy_version)
                if any(seen < version for _, seen in chunk.spans):
                    turn.drop_part()
                    self.counters.stale_replicas += 1
                    seen = min(seen for _, seen in chunk.spans)
                    raise ReplicaLost(f"it has version {seen} of the weights, not {version}: it was started anew")
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def _next(self, stream: AsyncIterator[ReplicaChunk], place: Place) -> ReplicaChunk | None:
        """The next chunk, None at the end. Raises ReplicaLost when the whole replica makes no progress."""
        waiting = asyncio.ensure_future(_anext(stream))
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=WATCH_S)
                if done:
                    if self.fleet.present(place):
                        self.fleet.heard(place.index)
                    return waiting.result()
                if not self.fleet.present(place):
                    raise ReplicaLost(f"{place.replica.name} is being replaced")
                if self._writing.locked() or not self._location:  # held up by an update, or by one that failed
                    self.fleet.heard(place.index)
                silent_s = time.monotonic() - self.fleet.progress[place.index]
                if silent_s > self._cfg.stall_s:
                    raise ReplicaStalled(f"{place.replica.name} has said nothing for {silent_s:.0f} s")
                if silent_s > health.QUIET_S:
                    self.fleet.question(place)
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting})

    async def _load(self, place: Place) -> None:
        """The stored weights into one replica; one that is lost meanwhile loads them when it is back."""
        replica = place.replica
        try:
            if self._sender is not None and self._sender.receives(place):
                await health.watched(replica, replica.close_update(version=self._stored))
                self._sender.finished(place)
            else:
                if self._cfg.layout == "colocated":
                    await health.watched(replica, replica.wake())
                await health.watched(replica, replica.load(self._location, version=self._stored))
            if (found := await health.watched(replica, replica.version())) != self._stored:
                raise ReplicaLost(f"{replica.name} says it has version {found} after loading {self._stored}")
        except ReplicaLost as err:
            self.fleet.replace(place, err)

    async def _catch_up(self, index: int) -> None:
        """The stored weights for a replica that has just started, after an update that is under way; after one that
        left wrong bits it waits for the next."""
        replica = self.replicas[index]
        while True:
            await self._whole.wait()
            async with self._writing:
                if not self._whole.is_set():
                    continue
                if self._location:
                    await health.watched(replica, replica.load(self._location, version=self._stored))
                self.fleet.set_usable(index)
                return

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


async def _anext(stream: AsyncIterator[ReplicaChunk]) -> ReplicaChunk | None:
    return await anext(stream, None)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
