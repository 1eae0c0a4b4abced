"""A Sandbox that runs commands on this machine in a temporary directory: Git mechanics without isolation."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Self

from swe_rl.types import ExecResult


class HostSandbox:
    """Implements the Sandbox protocol for trusted test commands; counts what it is asked to do."""

    def __init__(self, *, output_bytes: int = 1 << 20) -> None:
        self.output_bytes = output_bytes
        self.num_execs = 0
        self.closed = False

    async def exec(
        self, command: str, *, timeout_s: float | None = None, cwd: str | None = None, stdin: bytes | None = None
    ) -> ExecResult:
        self.num_execs += 1
        start = time.monotonic()
        pipe = asyncio.subprocess.PIPE
        proc = await asyncio.create_subprocess_exec(
            "bash", "-c", command, cwd=cwd or "/", stdin=pipe, stdout=pipe, stderr=pipe
        )
        out, err = await asyncio.wait_for(proc.communicate(stdin or b""), timeout_s or 60)
        code = proc.returncode or 0
        half = self.output_bytes // 2
        kept = out if len(out) <= self.output_bytes else out[:half] + out[-half:]
        return ExecResult(
            exit_code=code,
            stdout=kept,
            stderr=err,
            outcome="ok" if code == 0 else "nonzero",
            duration_s=time.monotonic() - start,
            stdout_bytes=len(out),
            stderr_bytes=len(err),
        )

    async def read_file(self, path: str) -> bytes:
        return Path(path).read_bytes()

    async def write_file(self, path: str, data: bytes) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    async def fork(self) -> Self:
        return self

    async def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
