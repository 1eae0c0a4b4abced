"""An outage of the engine is never the agent's loss of time."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from fakes import SUBMIT, Handle, World, make_parts
from real_parts import require

from swe_rl.errors import EngineDead, EngineError
from swe_rl.protocols import Policy, SamplingParams
from swe_rl.rollout.journal import RolloutKey
from swe_rl.rollout.ray_relay import PolicyRelay, PolicyServer, RelayedPolicy
from swe_rl.rollout.runner import RolloutRunner
from swe_rl.testing import ScriptedPolicy, make_task
from swe_rl.types import Completion, StopReason


class SlowPolicy:
    """Never answers in time; `outage` of the seconds until it is given up it says that it could not."""

    def __init__(self, outage: float) -> None:
        self._outage_s, self._outage, self.asked = 7.0, outage, 0  # it was out before

    async def outage_s(self) -> float:
        return self._outage_s

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        self.asked += 1
        self._outage_s += self._outage
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def release(self, session: str) -> None:
        pass


@asynccontextmanager
async def reached(policy: SlowPolicy, *, over_ray: bool) -> AsyncIterator[Policy]:
    """`policy`, or what an episode on another node has of it."""
    if not over_ray:
        yield policy
        return
    require(importlib.util.find_spec("ray") is not None, "package ray")
    relay = Handle(PolicyRelay())
    server = PolicyServer(relay)
    yield RelayedPolicy(relay, server.serve(policy))
    await server.close()


@pytest.mark.parametrize("over_ray", [False, True])
@pytest.mark.parametrize(
    ("outage", "reason", "asked"), [(0.0, StopReason.TIMEOUT, 1), (0.04, StopReason.INFRA_ERROR, 3)]
)
async def test_an_episode_that_ran_out_of_time_in_an_outage_is_played_again(
    outage: float, reason: StopReason, asked: int, over_ray: bool
) -> None:
    slow = SlowPolicy(outage)
    async with reached(slow, over_ray=over_ray) as policy:
        # A relayed question must have come before the time is over, also on a busy machine.
        parts = make_parts(World(), infra_retries=2, episode_s=1.0 if over_ray else 0.05)
        key = RolloutKey(phase="rl", step=0, task_id="add-0", rollout_index=0)
        found = await RolloutRunner(policy, parts=parts, run_seed=0).play(make_task(), key, temperature=1.0)
    assert (found.stop_reason, slow.asked) == (reason, asked)
    assert found.reward is None
    if outage:
        assert "0.0 s of it for outage of the engine" in found.detail
        assert found.timings_s["outage"] == pytest.approx(outage)


class Unreachable(ScriptedPolicy):
    """Its clock cannot be asked `failures` times, as while the relay is started again."""

    def __init__(self, failures: int, error: Exception) -> None:
        super().__init__([SUBMIT])
        self.failures, self.error = failures, error

    async def outage_s(self) -> float:
        if self.failures:
            self.failures -= 1
            raise self.error
        return 0.0


@pytest.mark.parametrize(("failures", "retried"), [(1, 1), (2, 2), (3, 2)])
async def test_a_clock_that_cannot_be_asked_is_trouble_of_the_machine(failures: int, retried: int) -> None:
    policy = Unreachable(failures, EngineError("the policy cannot be reached"))
    runner = RolloutRunner(policy, parts=make_parts(World(), infra_retries=2), run_seed=0)
    key = RolloutKey(phase="rl", step=0, task_id="add-0", rollout_index=0)
    found = await runner.play(make_task(), key, temperature=1.0)
    lost = failures > 2
    assert found.stop_reason is (StopReason.INFRA_ERROR if lost else StopReason.SUBMITTED)
    assert runner.retried == retried
    assert found.reward is None


async def test_an_engine_that_is_dead_stops_the_run() -> None:
    runner = RolloutRunner(Unreachable(1, EngineDead("gone")), parts=make_parts(World()), run_seed=0)
    key = RolloutKey(phase="rl", step=0, task_id="add-0", rollout_index=0)
    with pytest.raises(EngineDead, match="gone"):
        await runner.play(make_task(), key, temperature=1.0)
