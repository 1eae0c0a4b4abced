"""An outage of the engine is never the agent's loss of time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from fakes import World, make_parts

from swe_rl.protocols import SamplingParams
from swe_rl.rollout.journal import RolloutKey
from swe_rl.rollout.runner import RolloutRunner
from swe_rl.testing import make_task
from swe_rl.types import Completion, StopReason


class SlowPolicy:
    """Never answers in time; `outage` of the seconds until it is given up it says that it could not."""

    def __init__(self, outage: float) -> None:
        self.outage_s, self._outage, self.asked = 0.0, outage, 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        self.asked += 1
        self.outage_s += self._outage
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def release(self, session: str) -> None:
        pass


@pytest.mark.parametrize(
    ("outage", "reason", "asked"), [(0.0, StopReason.TIMEOUT, 1), (0.04, StopReason.INFRA_ERROR, 3)]
)
async def test_an_episode_that_ran_out_of_time_in_an_outage_is_played_again(
    outage: float, reason: StopReason, asked: int
) -> None:
    policy = SlowPolicy(outage)
    runner = RolloutRunner(policy, parts=make_parts(World(), infra_retries=2, episode_s=0.05), run_seed=0)
    key = RolloutKey(phase="rl", step=0, task_id="add-0", rollout_index=0)
    found = await runner.play(make_task(), key, temperature=1.0)
    assert (found.stop_reason, policy.asked) == (reason, asked)
    assert found.reward is None
    if outage:
        assert "0.0 s of it for outage of the engine" in found.detail
        assert found.timings_s["outage"] == pytest.approx(outage)
