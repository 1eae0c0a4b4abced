"""Connecting to a Ray cluster that gives nothing: one clear error each."""

from __future__ import annotations

import pytest

from swe_rl.config import TrainConfig
from swe_rl.errors import SandboxError
from swe_rl.rollout import ray_rollouts
from swe_rl.rollout.ray_rollouts import RayCluster


async def test_a_cluster_without_a_ready_node_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_rollouts, "START_S", 0.01)
    with pytest.raises(SandboxError, match="none of the 0 nodes of the Ray cluster was ready"):
        await RayCluster(TrainConfig(), "run")._first_node()
