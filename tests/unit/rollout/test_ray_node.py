"""What a node of a Ray cluster makes of the set-up that the driver sends, without a cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swe_rl.agents import ChatRenderer
from swe_rl.agents.environments import Bandit
from swe_rl.cli import build
from swe_rl.config import AgentConfig, AlgoConfig, TaskConfig, TrainConfig
from swe_rl.config.stop_presets import untested_reasons
from swe_rl.rollout.ray_node import RolloutNode, RunnerSetup
from swe_rl.testing import ByteTokenizer, ScriptedPolicy
from swe_rl.types import StopReason, Trajectory


@pytest.mark.parametrize("tested", [True, False])
async def test_run_tests_on_filtered_acts_on_the_nodes(
    tested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[RunnerSetup] = []

    def remote_runner(cluster: Any, policy: Any, setup: Any) -> Any:
        sent.append(setup("channel"))
        return SimpleNamespace()

    monkeypatch.setattr(build, "RemoteRunner", remote_runner)
    cfg = TrainConfig(
        task=TaskConfig(source="bandit"),
        agent=AgentConfig(max_turns=1),
        algo=AlgoConfig(stop_preset="deepswe_v01", run_tests_on_filtered=tested),
    )
    parts: Any = SimpleNamespace(
        pool=None,
        verifier=None,
        cluster=SimpleNamespace(places=1),
        renderer=ChatRenderer(ByteTokenizer()),
        trees=tmp_path,
        progress=SimpleNamespace(add=None),
    )
    # as the loop does it
    build.make_collector(cfg, parts=parts, policy=ScriptedPolicy([]), journal=None, untested=untested_reasons(cfg.algo))
    (setup,) = sent
    node = RolloutNode(cfg.sandbox, None, run_id="r")
    node._pool = SimpleNamespace(snapshot=Counter)  # type: ignore[assignment]
    arrived: asyncio.Future[RunnerSetup] = asyncio.get_running_loop().create_future()
    arrived.set_result(setup)
    (task,) = Bandit.tasks(split="train", num_tasks=1, seed=0)
    played = Trajectory(
        trajectory_id="t",
        task_id=task.task_id,
        group_id="g",
        rollout_index=0,
        turns=[],
        stop_reason=StopReason.MAX_TURNS,
        temperature=1.0,
        patch=b"blue",
    )
    reply = await node.grade([arrived], setup.channel, task, played)
    assert isinstance(reply.trajectory, Trajectory)
    assert reply.trajectory.reward is not None
    untested = reply.trajectory.reward.terms.get("untested") == 1.0
    assert untested == (not tested)
