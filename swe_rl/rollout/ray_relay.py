"""The driver's policy for episodes on other nodes: requests meet their answers in one small actor.

    episode ──generate──► PolicyRelay ◄──take── PolicyServer ──► the driver's policy
            ◄─completion─  (an actor)  ◄─answer─ (in the driver)

The policy stays in the driver's process, beside the weights. The driver is no actor, so it fetches requests, many at a
time; an answer takes two messages more than a direct call. All of it is token ids: nothing is rendered here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from swe_rl.errors import ConfigError, EngineDead, EngineError, InvariantError, SandboxUnavailable, SweRlError
from swe_rl.protocols import Policy, SamplingParams
from swe_rl.rollout.runner import outage_s
from swe_rl.types import Completion

log = logging.getLogger(__name__)

_TAKE_S = 5.0  # longest wait of the driver for requests, so that a lost relay is noticed
# Before each try of one answer; after them the relay is gone, and who waited there has an error by that.
_SEND_PAUSES_S = (0.0, 0.1, 0.5, 1.0)
_KINDS: dict[str, type[SweRlError]] = {
    cls.__name__: cls for cls in (EngineDead, EngineError, InvariantError, SandboxUnavailable, ConfigError)
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way between processes, by name: its class decides who handles it."""

    kind: str
    message: str

    @classmethod
    def of(cls, err: SweRlError) -> Failure:
        kind = next(name for name, known in {**_KINDS, "SweRlError": SweRlError}.items() if isinstance(err, known))
        return cls(kind, str(err))

    def exception(self) -> SweRlError:
        return _KINDS.get(self.kind, SweRlError)(self.message)


@dataclass(frozen=True, slots=True)
class Call:
    """One request: a generation, a question for the outage clock, or with params None the end of a request or, without
    a `request_id`, of a session."""

    request_id: str
    channel: str  # which of the driver's policies
    session: str
    prompt_ids: list[int] | None = None
    params: SamplingParams | None = None
    clock: bool = False


Answer = Completion | float | Failure  # float: of the outage clock


class PolicyRelay:
    """The actor. It holds requests until the driver takes them, and callers until the driver answers."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._arrived = asyncio.Event()
        self._answers: dict[str, asyncio.Future[Answer]] = {}

    async def ask(self, call: Call) -> Answer:
        answer = self._answers[call.request_id] = asyncio.get_running_loop().create_future()
        self._post(call)
        return await answer

    async def tell(self, call: Call) -> None:
        """The end of a session or of a request; nothing is answered."""
        found = self._answers.pop(call.request_id, None)
        if found is not None and not found.done():
            found.set_result(Failure("EngineError", "the request was cancelled"))
        self._post(call)

    async def take(self) -> list[Call]:
        """All calls that wait; after `_TAKE_S` seconds without any an empty list."""
        if not self._calls:
            try:
                await asyncio.wait_for(self._arrived.wait(), _TAKE_S)
            except TimeoutError:
                return []
        calls, self._calls = self._calls, []
        self._arrived.clear()
        return calls

    async def answer(self, answers: list[tuple[str, Answer]]) -> None:
        for request_id, result in answers:
            found = self._answers.pop(request_id, None)
            if found is not None and not found.done():
                found.set_result(result)

    def _post(self, call: Call) -> None:
        self._calls.append(call)
        self._arrived.set()


class RelayedPolicy:
    """Implements Policy on a node, through the relay's actor handle."""

    def __init__(self, relay: Any, channel: str) -> None:
        self._relay, self._channel = relay, channel

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """As the driver's policy. Raises EngineError when the relay is lost meanwhile."""
        found = await self._ask(Call(uuid.uuid4().hex, self._channel, session, list(prompt_ids), params))
        assert isinstance(found, Completion)
        return found

    async def outage_s(self) -> float:
        """As protocols.OutageClock, of the driver's policy: an engine is out for all nodes. Raises EngineError when the
        relay is lost meanwhile."""
        found = await self._ask(Call(uuid.uuid4().hex, self._channel, "", clock=True))
        assert isinstance(found, float)
        return found

    async def release(self, session: str) -> None:
        self._relay.tell.remote(Call("", self._channel, session))

    async def _ask(self, call: Call) -> Completion | float:
        from ray.exceptions import RayError

        try:
            result: Answer = await self._relay.ask.remote(call)
        except RayError as err:
            raise EngineError(f"the policy cannot be reached: {type(err).__name__}") from err
        except asyncio.CancelledError:
            self._relay.tell.remote(Call(call.request_id, self._channel, call.session))
            raise
        if isinstance(result, Failure):
            raise result.exception()
        return result


class PolicyServer:
    """In the driver: takes requests from the relay, asks the policy of their channel, sends the answers back."""

    def __init__(self, relay: Any) -> None:
        self._relay = relay
        self._policies: dict[str, Policy] = {}
        self._names = itertools.count()
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}  # by request: session, the policy's task
        self._outbox: list[tuple[str, Answer]] = []
        self._flush: asyncio.Task[None] | None = None
        self._loop: asyncio.Task[None] | None = None

    def serve(self, policy: Policy) -> str:
        """Makes `policy` reachable; returns the name of its channel."""
        channel = str(next(self._names))
        self._policies[channel] = policy
        if self._loop is None:
            self._loop = asyncio.create_task(self._work(), name="policy-server")
        return channel

    async def forget(self, channel: str, session: str) -> None:
        """A node is gone: ends what it asked for in that session, which nobody will release."""
        for request_id, (owner, task) in list(self._running.items()):
            if owner == session:
                task.cancel()
                self._running.pop(request_id, None)
        await _release(self._policies[channel], session)

    async def close(self) -> None:
        tasks = [task for _, task in self._running.values()]
        tasks += [task for task in (self._loop, self._flush) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._running.clear()

    async def _work(self) -> None:
        from ray.exceptions import RayError

        while True:
            try:
                calls = await self._relay.take.remote()
            except RayError as err:  # it is being restarted; callers on the nodes get an EngineError and try again
                log.warning("the policy relay does not answer: %s", type(err).__name__)
                await asyncio.sleep(0.5)
                continue
            for call in calls:
                await self._handle(call)

    async def _handle(self, call: Call) -> None:
        policy = self._policies[call.channel]
        if call.clock:
            self._start(call, partial(outage_s, policy))
        elif call.params is not None and call.prompt_ids is not None:
            self._start(call, partial(policy.generate, call.prompt_ids, call.params, session=call.session))
        elif call.request_id:
            _, running = self._running.pop(call.request_id, ("", None))
            if running is not None:
                running.cancel()
        else:
            await _release(policy, call.session)

    def _start(self, call: Call, ask: Callable[[], Awaitable[Completion | float]]) -> None:
        task = asyncio.create_task(self._answer(call, ask))
        self._running[call.request_id] = (call.session, task)

    async def _answer(self, call: Call, ask: Callable[[], Awaitable[Completion | float]]) -> None:
        result: Answer
        try:
            result = await ask()
        except SweRlError as err:
            result = Failure.of(err)
        except Exception as err:  # a bug of the policy must end the run there, not hang the node here
            log.exception("the policy failed")
            result = Failure("InvariantError", f"the policy failed: {err!r}")
        self._running.pop(call.request_id, None)
        self._outbox.append((call.request_id, result))
        if self._flush is None or self._flush.done():
            self._flush = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while self._outbox:
            answers, self._outbox = self._outbox, []
            if why := await self._undelivered(answers):
                log.warning("%d answers could not be delivered (%s): they are sent one by one", len(answers), why)
                for request_id, result in answers:
                    await self._insist(request_id, result)

    async def _insist(self, request_id: str, result: Answer) -> None:
        """One answer alone; one that cannot travel is an EngineError of the caller, who would wait for ever."""
        for pause_s in _SEND_PAUSES_S:
            await asyncio.sleep(pause_s)
            if not (why := await self._undelivered([(request_id, result)])):
                return
            result = Failure("EngineError", f"the answer could not be delivered: {why}")
        log.warning("an answer was given up: %s", result)

    async def _undelivered(self, answers: list[tuple[str, Answer]]) -> str:
        """Why these did not reach the relay; "" when they did."""
        try:
            await self._relay.answer.remote(answers)
        except Exception as err:  # of Ray, or of what cannot be sent: the other answers have to go on
            return f"{type(err).__name__}: {err}"[:200]
        return ""


async def _release(policy: Policy, session: str) -> None:
    """Whatever a policy has against it: the server must go on for the other sessions."""
    try:
        await policy.release(session)
    except EngineError as err:
        log.warning("session %s was not released: %s", session, err)
    except Exception:  # a bug of the policy
        log.exception("session %s was not released", session)
