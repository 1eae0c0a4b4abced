"""The sandbox as its pool hands it out: every call is counted, and forks are charged to the pool."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

from swe_rl.errors import SandboxLost
from swe_rl.protocols import Sandbox
from swe_rl.sandbox.stats import observe
from swe_rl.types import ExecResult, SandboxSpec

_T = TypeVar("_T")


class LeasedSandbox:
    """Implements Sandbox around another one. `give_back` closes that one and frees its place."""

    def __init__(
        self,
        inner: Sandbox,
        spec: SandboxSpec,
        *,
        counts: Counter[str],
        give_back: Callable[[LeasedSandbox], Awaitable[None]],
        adopt: Callable[[Sandbox, SandboxSpec], LeasedSandbox],
    ) -> None:
        self.inner = inner
        self.spec = spec
        self._counts = counts
        self._give_back = give_back
        self._adopt = adopt
        self._closing: asyncio.Task[None] | None = None

    async def exec(
        self, command: str, *, timeout_s: float | None = None, cwd: str | None = None, stdin: bytes | None = None
    ) -> ExecResult:
        start = time.monotonic()
        result = await self._watched(self.inner.exec(command, timeout_s=timeout_s, cwd=cwd, stdin=stdin))
        observe(self._counts, f"{self.spec.backend}_exec", time.monotonic() - start)
        self._counts[f"outcome_{result.outcome}"] += 1
        produced = result.stdout_bytes + result.stderr_bytes
        self._counts["output_bytes"] += produced
        self._counts["output_bytes_cut"] += max(0, produced - len(result.stdout) - len(result.stderr))
        return result

    async def read_file(self, path: str) -> bytes:
        return await self._watched(self.inner.read_file(path))

    async def write_file(self, path: str, data: bytes) -> None:
        await self._watched(self.inner.write_file(path, data))

    async def fork(self) -> LeasedSandbox:
        """A copy that the caller closes. It takes room of the node at once, and later sandboxes wait for it."""
        start = time.monotonic()
        inner = await self._watched(self.inner.fork())
        observe(self._counts, f"{self.spec.backend}_fork", time.monotonic() - start)
        return self._adopt(inner, self.spec)

    async def close(self) -> None:
        """Closes it and frees its place, once; also when the caller is cancelled meanwhile."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._give_back(self))
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _watched(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except SandboxLost:
            self._counts["lost"] += 1
            raise
