"""The replicas of an engine: which of them can be asked, and how one that was lost comes back.

A lost replica is ended and started anew in the background. While the trainer has the devices (`rest`) none is started:
it would take the memory that the trainer computes in. Whoever calls a replica holds a Place, of one start of it: what
is learned late about an earlier start does not end the present one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swe_rl.errors import EngineDead, EngineError
from swe_rl.inference.vllm import health
from swe_rl.inference.vllm.replica import START_S, Replica, ReplicaLost, ReplicaStalled
from swe_rl.inference.vllm.router import Router

log = logging.getLogger(__name__)

START_TRIES = 3  # in a row, after which a replica is given up
RETRY_S = 2.0  # before the second of them, twice as long before the third
GRACE_S = 30.0  # beyond START_S, for a replica that can say better what was wrong
CLOSE_S = 60.0  # after which a replica that does not end is left to the end of this process
SILENCE_S = 30.0  # of a replica with requests: longer is no slow step, and counts as an outage whatever becomes of it


@dataclass(frozen=True, slots=True)
class Place:
    """One start of one replica."""

    index: int
    generation: int  # starts of it before
    replica: Replica


class Fleet:
    """`catch_up(index)` gives a replica that has just started the present weights, then calls `set_usable`."""

    def __init__(
        self, replicas: Sequence[Replica], *, max_skew: int, catch_up: Callable[[int], Awaitable[None]]
    ) -> None:
        self.replicas = list(replicas)
        self.router = Router(len(self.replicas), max_skew)
        self.progress = [0.0] * len(self.replicas)  # when each last said something
        self.restarts = 0  # of replicas that were lost
        self.stalls = 0  # of them, because they gave no token or did not answer
        self._generations = [-1] * len(self.replicas)
        self._questions: dict[int, asyncio.Task[None]] = {}  # to silent replicas, by index
        self._answered = [0.0] * len(self.replicas)  # when each last said that it is well
        self._catch_up = catch_up
        self._restarting: dict[int, asyncio.Task[None]] = {}
        self._given_up: dict[int, EngineError] = {}
        self._changed = asyncio.Event()  # a replica became usable, or was given up
        self._awake = asyncio.Event()  # not set: the trainer has the devices
        self._awake.set()
        self._resting = False  # nobody is handed out: it is asleep, about to be, or has no weights yet
        self._outage_s, self._outage_since = 0.0, 0.0  # since: 0 while a replica is usable
        self._counted_until = 0.0  # end of what is in _outage_s: no second counts twice, however many replicas lost it
        self._closed = False

    @property
    def outage_s(self) -> float:
        """Seconds so far in which a replica had been lost and none was there to be asked, or in which one with requests
        was silent because it hung: an episode may run out of time before anybody knows. Never falls."""
        now = time.monotonic()
        begun = [since for index in range(len(self.replicas)) if (since := self._silent_since(index))]
        begun += [self._outage_since] if self._outage_since else []
        return self._outage_s + now - max(min(begun, default=now), self._counted_until)

    async def start(self) -> None:
        """Starts all. Raises EngineError when one does not start."""
        await run_all(_start(replica) for replica in self.replicas)
        for index in range(len(self.replicas)):
            self.set_usable(index)

    async def start_anew(self) -> None:
        """Ends all and starts them with the present weights: what they were started with has changed."""
        await self._stop_restarts()
        self.router.usable = [False] * len(self.replicas)
        await run_all(self._end(index) for index in range(len(self.replicas)))
        await run_all(self._bring_up(index) for index in range(len(self.replicas)))

    def usable(self) -> list[Place]:
        """Those that can be asked."""
        return [self._place(index) for index, usable in enumerate(self.router.usable) if usable]

    def present(self, place: Place) -> bool:
        """Whether that start of the replica can still be asked."""
        return self.router.usable[place.index] and self._generations[place.index] == place.generation

    def set_usable(self, index: int) -> None:
        """From now on it is asked."""
        self.router.usable[index] = True
        self._generations[index] += 1
        self._given_up.pop(index, None)
        self.progress[index] = time.monotonic()
        if self._outage_since:
            self._count_outage(self._outage_since)
            self._outage_since = 0.0
        self._changed.set()

    async def take(self, session: str) -> Place:
        """A place at a replica, to be given back to the router. Waits while all are being started anew, and from `rest`
        until `wake_up`. Raises EngineDead when none will come back."""
        while (index := None if self._resting else self.router.take(session)) is None:
            if self._closed:
                raise EngineError("the engine was closed")
            if len(self._given_up) == len(self.replicas):
                raise EngineDead(f"no replica is left: {next(iter(self._given_up.values()))}")
            self._changed.clear()
            await self._changed.wait()
        if self.router.running[index] == 1:
            self.progress[index] = time.monotonic()  # it was idle until now
        return self._place(index)

    def give_back(self, place: Place) -> None:
        """The request is over, or was given up: its replica may be silent with nobody left who waits for it."""
        if self.present(place) and (since := self._silent_since(place.index)):
            self._count_outage(since)
        self.router.give_back(place.index)

    def heard(self, index: int) -> None:
        """It said something, or was kept from it."""
        if since := self._silent_since(index):
            self._count_outage(since)
        self.progress[index] = time.monotonic()

    def replace(self, place: Place, err: EngineError) -> None:
        """Ends a lost replica and starts it again in the background. Once per loss, however many turns notice, and
        however late."""
        if not self.present(place) or self._closed:
            return
        index = place.index
        log.warning("%s; it is started again", err)
        if isinstance(err, ReplicaStalled) and self.router.running[index]:
            self._count_outage(self.progress[index])
        self.router.usable[index] = False
        if not any(self.router.usable) and not self._outage_since:
            self._outage_since = time.monotonic()
        self.restarts += 1
        self.stalls += isinstance(err, ReplicaStalled)
        self._restarting[index] = asyncio.create_task(self._restart(index), name=f"restart {self.replicas[index].name}")

    def question(self, place: Place) -> None:
        """Asks a silent replica in the background whether it is well, and replaces it when it does not answer. Does
        nothing while it is being asked, or soon after it has answered."""
        index = place.index
        if index in self._questions or time.monotonic() - self._answered[index] < health.QUIET_S:
            return
        task = self._questions[index] = asyncio.create_task(self._ask(place), name=f"ask {place.replica.name}")
        task.add_done_callback(lambda _: self._questions.pop(index, None))

    async def rest(self) -> None:
        """Leaves the devices to the trainer until `wake_up`. What is starting is up first: it could not be stopped
        half way without losing the device's memory."""
        self._resting = True
        while starting := [task for task in self._restarting.values() if not task.done()]:  # one may be lost meanwhile
            await asyncio.gather(*starting, return_exceptions=True)
        self._awake.clear()
        await run_all(self._sleep(place) for place in self.usable())

    def wake_up(self) -> None:
        """The trainer is done and those that slept have their new weights: lost replicas are started again."""
        self._resting = False
        self._awake.set()
        self._changed.set()

    async def close(self) -> None:
        """Ends all. Idempotent."""
        self._closed = True
        await self._stop_restarts()
        for question in self._questions.values():
            question.cancel()
        self.router.usable = [False] * len(self.replicas)
        self._changed.set()
        await asyncio.gather(*(self._end(index) for index in range(len(self.replicas))), return_exceptions=True)

    def _silent_since(self, index: int) -> float:
        """When it last said something, if it has requests and has been silent for SILENCE_S; else 0."""
        since = self.progress[index]
        waited_for = self.router.usable[index] and self.router.running[index]
        return since if waited_for and time.monotonic() - since > SILENCE_S else 0.0

    def _count_outage(self, since: float) -> None:
        now = time.monotonic()
        self._outage_s += now - max(since, self._counted_until)
        self._counted_until = now

    def _place(self, index: int) -> Place:
        return Place(index, self._generations[index], self.replicas[index])

    async def _ask(self, place: Place) -> None:
        if await health.answers(place.replica):
            self._answered[place.index] = time.monotonic()
        else:
            self.replace(place, ReplicaStalled(f"{place.replica.name} does not answer"))

    async def _sleep(self, place: Place) -> None:
        try:
            await health.watched(place.replica, place.replica.sleep(2))
        except ReplicaLost as err:
            self.replace(place, err)

    async def _restart(self, index: int) -> None:
        for attempt in range(START_TRIES):
            try:
                await self._end(index)
                await self._awake.wait()
                await self._bring_up(index)
                return
            except Exception as err:  # the boundary of this task: turns wait for its end, whatever it is
                log.warning("%s could not be started again: %s", self.replicas[index].name, err)
                if attempt == START_TRIES - 1:
                    self._given_up[index] = err if isinstance(err, EngineError) else EngineError(repr(err))
                    self._changed.set()
            await asyncio.sleep(RETRY_S * (attempt + 1))

    async def _bring_up(self, index: int) -> None:
        await _start(self.replicas[index])
        await self._catch_up(index)

    async def _end(self, index: int) -> None:
        replica = self.replicas[index]
        try:
            await _within(replica.close(), CLOSE_S, f"{replica.name} did not end")
        except EngineError as err:
            log.warning("%s", err)

    async def _stop_restarts(self) -> None:
        tasks = list(self._restarting.values())
        self._restarting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_all(calls: Any) -> None:
    """Runs all to their end, then raises the first failure: none is left running behind it."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _start(replica: Replica) -> None:
    await _within(replica.start(), START_S + GRACE_S, f"{replica.name} did not start")


async def _within(call: Awaitable[None], limit_s: float, what: str) -> None:
    """Raises EngineError when the call takes longer; a TimeoutError of its own passes through."""
    scope = asyncio.timeout(limit_s)
    try:
        async with scope:
            await call
    except TimeoutError as err:
        if not scope.expired():
            raise
        raise EngineError(f"{what} within {limit_s:.0f} s") from err
