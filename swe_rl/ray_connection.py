"""This process's connection to Ray: rollouts on all nodes and engines in actors use one, whichever comes first."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from swe_rl.errors import ConfigError

CONNECT_S = 10.0
STORE_BYTES = 256 << 20  # object store of an instance that is started here: tasks and trajectories, no weights


@asynccontextmanager
async def ray_connection(address: str = "") -> AsyncIterator[None]:
    """Connects to `address` (rollout.ray_address), to RAY_ADDRESS, or to an instance of its own that ends with the
    block. Blocks nest: an inner one uses the connection of the outer one, which has to have the same address.

    Raises ConfigError when Ray is not installed or the address does not answer.
    """
    try:
        import ray
    except ImportError as err:
        raise ConfigError("rollout.backend=ray and engine.layout=ray need Ray: pip install 'swe-rl[ray]'") from err
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    where = address or os.environ.get("RAY_ADDRESS") or None
    await check_answers(where)
    options: dict[str, Any] = {} if where else {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        await asyncio.to_thread(
            lambda: ray.init(where or "local", log_to_driver=False, logging_level=logging.WARNING, **options)
        )
    except (ConnectionError, ValueError) as err:
        raise ConfigError(f"rollout.ray_address={where}: no Ray cluster answers there ({err})") from err
    try:
        yield
    finally:
        await asyncio.to_thread(ray.shutdown)


async def check_answers(address: str | None) -> None:
    """Raises ConfigError when nobody listens at HOST:PORT; Ray itself tries for minutes, in many lines."""
    host, _, port = (address or "").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return  # "auto", an instance of our own, ray://...: Ray says what is wrong
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), CONNECT_S)
    except (OSError, OverflowError) as err:
        raise ConfigError(
            f"rollout.ray_address={address}: no Ray cluster answers there ({str(err) or 'no answer'})"
        ) from err
    writer.close()
