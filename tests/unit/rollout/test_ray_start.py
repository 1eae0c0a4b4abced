"""Connecting to a Ray cluster that gives nothing: one clear error each."""

from __future__ import annotations

import socket

import pytest

from swe_rl.config import TrainConfig
from swe_rl.errors import ConfigError, SandboxError
from swe_rl.ray_connection import check_answers
from swe_rl.rollout import ray_rollouts
from swe_rl.rollout.ray_rollouts import RayCluster


async def test_a_cluster_without_a_ready_node_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_rollouts, "START_S", 0.01)
    with pytest.raises(SandboxError, match="none of the 0 nodes of the Ray cluster was ready"):
        await RayCluster(TrainConfig(), "run")._first_node()


async def test_an_address_where_nobody_listens_is_one_line_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets the port meanwhile
        for address in (f"127.0.0.1:{unused.getsockname()[1]}", "127.0.0.1:99999"):
            with pytest.raises(ConfigError, match=r"rollout.ray_address=127.*no Ray cluster answers") as caught:
                await check_answers(address)
            assert "\n" not in str(caught.value)
    with socket.create_server(("127.0.0.1", 0)) as server:
        await check_answers(f"127.0.0.1:{server.getsockname()[1]}")
    for left_to_ray in (None, "auto", "local", "ray://somewhere:1"):
        await check_answers(left_to_ray)
