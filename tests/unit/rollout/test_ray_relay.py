"""The relay between episodes elsewhere and the driver's policy: answers, errors, cancellation, sessions. Without a
cluster: an actor handle is stood in for by the object itself."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from fakes import Handle
from real_parts import require

from swe_rl.errors import EngineDead, EngineError, InvariantError, SandboxUnavailable, SweRlError
from swe_rl.protocols import OutageClock, SamplingParams
from swe_rl.rollout.ray_relay import Failure, PolicyRelay, PolicyServer, RelayedPolicy
from swe_rl.testing import ScriptedPolicy
from swe_rl.types import Completion

PARAMS = SamplingParams(max_new_tokens=64, stop_ids=(258,), seed=5)


@pytest.fixture
async def relay() -> AsyncIterator[tuple[Handle, PolicyServer]]:
    require(importlib.util.find_spec("ray") is not None, "package ray")
    handle = Handle(PolicyRelay())
    server = PolicyServer(handle)
    yield handle, server
    await server.close()


async def test_answers_reach_whoever_asked(relay: tuple[Handle, PolicyServer]) -> None:
    handle, server = relay
    policies = [ScriptedPolicy(lambda session, turn: f"{session}-{turn}", delay_s=0.001, version=v) for v in (1, 2)]
    remote = [RelayedPolicy(handle, server.serve(policy)) for policy in policies]

    async def episode(which: int, session: str) -> list[str]:
        prompt, texts = [65], []
        for _ in range(3):
            got = await remote[which].generate(prompt, PARAMS, session=session)
            assert got.policy_version == which + 1
            texts.append(bytes(got.token_ids[:-1]).decode())
            prompt = [*prompt, *got.token_ids]
        await remote[which].release(session)
        return texts

    found = await asyncio.gather(*(episode(i % 2, f"s{i}") for i in range(10)))
    assert found == [[f"s{i}-{turn}" for turn in range(3)] for i in range(10)]
    await asyncio.sleep(0.02)
    assert sorted(policies[0].released) == ["s0", "s2", "s4", "s6", "s8"]
    assert policies[1].seeds["s1", 2] == 5


async def test_errors_keep_their_kind(relay: tuple[Handle, PolicyServer]) -> None:
    handle, server = relay
    errors = {"dead": EngineDead("gone"), "busy": EngineError("full"), "drift": InvariantError("nan")}
    remote = RelayedPolicy(handle, server.serve(ScriptedPolicy(lambda session, turn: errors[session])))
    for session, error in errors.items():
        with pytest.raises(type(error), match=str(error)) as caught:
            await remote.generate([1], PARAMS, session=session)
        assert type(caught.value) is type(error)


async def test_a_bug_of_the_policy_does_not_hang_the_node(relay: tuple[Handle, PolicyServer]) -> None:
    handle, server = relay

    class Broken(ScriptedPolicy):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
            raise KeyError("typo")

    remote = RelayedPolicy(handle, server.serve(Broken([])))
    with pytest.raises(InvariantError, match="KeyError"):
        await asyncio.wait_for(remote.generate([1], PARAMS, session="s"), 5)


@pytest.mark.parametrize("failures", [1, 2])
async def test_an_answer_that_is_not_delivered_is_sent_again_or_an_error_of_its_caller(
    relay: tuple[Handle, PolicyServer], failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's own call to the relay may be well although the driver's was not: it would wait for ever."""
    from ray.exceptions import RayError

    handle, server = relay
    actor, tries = handle._actor, []
    deliver = actor.answer

    async def answer(answers: list[Any]) -> None:
        tries.append(len(answers))
        if len(tries) <= failures:
            raise RayError("the connection was reset")
        await deliver(answers)

    monkeypatch.setattr(actor, "answer", answer)
    remote = RelayedPolicy(handle, server.serve(ScriptedPolicy(["a"] * 4)))
    asked = asyncio.wait_for(remote.generate([1], PARAMS, session="s"), 5)
    if failures == 1:
        assert (await asked).token_ids
    else:
        with pytest.raises(EngineError, match="could not be delivered: RayError: the connection was reset"):
            await asked
    assert (await asyncio.wait_for(remote.generate([1], PARAMS, session="t"), 5)).token_ids


async def test_the_relay_has_a_moment_before_an_answer_becomes_an_error(
    relay: tuple[Handle, PolicyServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, server = relay
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def recorded(delay: float) -> None:
        pauses.append(delay)
        await sleep(0)

    async def answer(answers: list[Any]) -> None:
        raise ConnectionError("reset")

    monkeypatch.setattr(handle._actor, "answer", answer)
    monkeypatch.setattr(asyncio, "sleep", recorded)
    await server._insist("r", Failure("EngineError", "full"))
    assert pauses == [0.0, 0.1, 0.5, 1.0]


async def test_an_answer_that_cannot_travel_holds_no_other_one_up(
    relay: tuple[Handle, PolicyServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, server = relay
    actor = handle._actor
    deliver = actor.answer

    async def answer(answers: list[Any]) -> None:
        if any(getattr(result, "policy_version", 0) == 13 for _, result in answers):
            raise TypeError("cannot be pickled")
        await deliver(answers)

    monkeypatch.setattr(actor, "answer", answer)
    bad, good = (RelayedPolicy(handle, server.serve(ScriptedPolicy(["a"] * 4, version=v))) for v in (13, 1))
    results = await asyncio.wait_for(
        asyncio.gather(*(p.generate([1], PARAMS, session=str(p)) for p in (bad, good)), return_exceptions=True), 5
    )
    assert isinstance(results[0], EngineError)
    assert isinstance(results[1], Completion)


async def test_a_session_that_cannot_be_released_does_not_end_the_server(relay: tuple[Handle, PolicyServer]) -> None:
    handle, server = relay

    class Broken(ScriptedPolicy):
        async def release(self, session: str) -> None:
            raise KeyError(session)

    remote = RelayedPolicy(handle, server.serve(Broken(["a"])))
    await remote.release("other")
    await asyncio.sleep(0.02)
    assert await asyncio.wait_for(remote.generate([1], PARAMS, session="s"), 5)


async def test_cancelling_there_cancels_here(relay: tuple[Handle, PolicyServer]) -> None:
    handle, server = relay
    state = {"running": 0, "cancelled": 0}

    class Slow(ScriptedPolicy):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
            state["running"] += 1
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                state["cancelled"] += 1
                raise
            raise AssertionError("too late")

    slow = Slow([])
    channel = server.serve(slow)
    remote = RelayedPolicy(handle, channel)
    one = asyncio.create_task(remote.generate([1], PARAMS, session="one"))
    two = asyncio.create_task(remote.generate([1], PARAMS, session="two"))
    await asyncio.sleep(0.05)
    assert state["running"] == 2
    one.cancel()
    await asyncio.sleep(0.05)
    assert state["cancelled"] == 1
    await server.forget(channel, "two")  # its node is gone
    assert slow.released == ["two"]
    await asyncio.sleep(0.05)
    assert state["cancelled"] == 2
    two.cancel()


class OutFor(ScriptedPolicy):
    """Has been out for so many seconds; a session asks in vain."""

    def __init__(self, seconds: float | Exception) -> None:
        super().__init__([])
        self.seconds = seconds

    async def outage_s(self) -> float:
        if isinstance(self.seconds, Exception):
            raise self.seconds
        return self.seconds


async def test_the_outage_clock_is_the_drivers(relay: tuple[Handle, PolicyServer]) -> None:
    handle, server = relay
    out, mute = OutFor(1.5), ScriptedPolicy([])
    remote = RelayedPolicy(handle, server.serve(out))
    assert isinstance(remote, OutageClock)
    assert await remote.outage_s() == 1.5
    out.seconds = 4.25
    assert await asyncio.gather(*(remote.outage_s() for _ in range(3))) == [4.25] * 3
    assert await RelayedPolicy(handle, server.serve(mute)).outage_s() == 0.0
    for wrong, kind in ((EngineDead("gone"), EngineDead), (KeyError("typo"), InvariantError)):
        out.seconds = wrong
        with pytest.raises(kind):
            await remote.outage_s()
    assert server._running == {}


async def test_a_lost_relay_has_no_clock() -> None:
    require(importlib.util.find_spec("ray") is not None, "package ray")
    from ray.exceptions import ActorDiedError

    class Lost:
        async def ask(self, call: Any) -> Any:
            raise ActorDiedError

    with pytest.raises(EngineError, match="the policy cannot be reached: ActorDiedError"):
        await RelayedPolicy(Handle(Lost()), "0").outage_s()


def test_failures_travel_by_name() -> None:
    for error in (SandboxUnavailable("no namespaces"), EngineDead("x"), SweRlError("other")):
        back = Failure.of(error).exception()
        assert (type(back), str(back)) == (type(error), str(error))
