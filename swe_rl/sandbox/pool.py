"""Opening sandboxes by backend, and how many may be alive at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swe_rl.errors import ConfigError
from swe_rl.protocols import Sandbox
from swe_rl.sandbox.bare import BareSandbox
from swe_rl.sandbox.local import LocalSandbox
from swe_rl.types import SandboxSpec


async def _start(spec: SandboxSpec) -> Sandbox:
    if spec.backend != "local":
        raise ConfigError(f"sandbox.backend={spec.backend!r} is not available: use local")
    if spec.isolation == "none":
        return await BareSandbox(spec).start()
    return await LocalSandbox(spec).start()


@asynccontextmanager
async def open_sandbox(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    """A fresh sandbox for the length of the block; leaving it removes every trace.

    Raises SandboxUnavailable (with the cure) where the machine allows none, ConfigError for a spec that cannot be
    honoured, SandboxError for other trouble.
    """
    sandbox = await _start(spec)
    try:
        yield sandbox
    finally:
        await asyncio.shield(sandbox.close())


class SandboxPool:
    """Admits at most `max_concurrency` sandboxes at a time. Each is used once: none is ever recycled."""

    def __init__(self, max_concurrency: int) -> None:
        if max_concurrency < 1:
            raise ConfigError(f"sandbox.concurrency={max_concurrency} must be at least 1")
        self.max_concurrency = max_concurrency
        self._slots = asyncio.Semaphore(max_concurrency)

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """Waits for a free slot, then behaves as `open_sandbox`."""
        async with self._slots, open_sandbox(spec) as sandbox:
            yield sandbox
