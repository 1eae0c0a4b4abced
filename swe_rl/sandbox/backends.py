"""Opening one sandbox by its backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swe_rl.errors import ConfigError
from swe_rl.protocols import Sandbox
from swe_rl.types import SandboxSpec


async def start_sandbox(spec: SandboxSpec) -> Sandbox:
    """A fresh sandbox, ready; the caller closes it.

    Raises SandboxUnavailable (with the cure) where the machine allows none, ConfigError for a spec that cannot be
    honoured, SandboxError for other trouble.
    """
    if spec.backend == "local" and spec.isolation == "none":
        from swe_rl.sandbox.bare import BareSandbox

        return await BareSandbox(spec).start()
    if spec.backend == "local":
        from swe_rl.sandbox.local import LocalSandbox

        return await LocalSandbox(spec).start()
    if spec.backend == "docker":
        from swe_rl.sandbox.docker import DockerSandbox

        return await DockerSandbox(spec).start()
    raise ConfigError(f"sandbox.backend={spec.backend!r} is not available: use local or docker")


@asynccontextmanager
async def open_sandbox(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    """A fresh sandbox for the length of the block; leaving it removes every trace. Raises as `start_sandbox` does."""
    sandbox = await start_sandbox(spec)
    try:
        yield sandbox
    finally:
        await asyncio.shield(sandbox.close())
