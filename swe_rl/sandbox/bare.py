"""isolation="none": a process group in a copied temporary tree. No protection whatsoever; for trusted code only."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections import deque
from typing import Self

from swe_rl.errors import ConfigError, SandboxError
from swe_rl.sandbox.base_root import environment, shell_path
from swe_rl.sandbox.owner import owner_label
from swe_rl.sandbox.wire import refused
from swe_rl.types import ExecResult, Outcome, SandboxSpec

PREFIX = "swe-rl-bare-"
_DRAIN_S = 0.05
_WARNING = "sandbox.isolation=none: commands run UNPROTECTED on this machine, with its files and its network"


class _Capture:
    """Head and tail of one stream."""

    def __init__(self, keep: int) -> None:
        self.total = 0
        self._head_cap, self._tail_cap = keep - keep // 2, keep // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_len = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_cap - len(self._head)
        self._head += data[:room]
        if rest := data[room:]:
            self._tail.append(rest)
            self._tail_len += len(rest)
            while self._tail and self._tail_len - len(self._tail[0]) >= self._tail_cap:
                self._tail_len -= len(self._tail.popleft())

    def text(self) -> bytes:
        tail = b"".join(self._tail)
        cut = max(len(tail) - self._tail_cap, 0)
        kept = len(self._head) + len(tail) - cut
        marker = b"\n[... %d bytes omitted ...]\n" % (self.total - kept) if kept < self.total else b""
        return bytes(self._head) + marker + tail[cut:]


class BareSandbox:
    """Implements protocols.Sandbox without isolation. `workdir` is a copy in a temporary directory.

    Time and output limits hold; memory, process and disk limits do not. Paths of `cwd`, `read_file` and `write_file`
    are inside the copy; a command itself sees the host's, so only relative paths in it mean the same in both modes.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self._root = ""
        self._groups: set[int] = set()

    async def start(self) -> Self:
        """Copies the layers. Raises ConfigError for a spec with readonly_mounts or an image, SandboxError when copying
        fails."""
        if self.spec.image:
            raise ConfigError(f"sandbox.isolation=none cannot enter the image {self.spec.image}: use namespaces")
        if self.spec.readonly_mounts:
            place = self.spec.readonly_mounts[0][1]
            raise ConfigError(f"sandbox.isolation=none cannot show {place}, which this task needs: use namespaces")
        if self.spec.egress:
            raise ConfigError("sandbox.isolation=none has the network of this machine: sandbox.egress needs namespaces")
        warnings.warn(_WARNING, stacklevel=2)
        try:
            await asyncio.to_thread(self._make_root)
        except (OSError, shutil.Error) as err:
            await self.close()
            raise SandboxError(f"the tree of the sandbox could not be copied: {err}") from err
        return self

    def _make_root(self) -> None:
        self._root = tempfile.mkdtemp(prefix=f"{PREFIX}{owner_label()}-")
        os.makedirs(self._host("/tmp"), exist_ok=True)
        os.makedirs(self._host(self.spec.workdir), exist_ok=True)
        for layer in reversed(self.spec.layers):
            shutil.copytree(layer, self._host(self.spec.workdir), symlinks=True, dirs_exist_ok=True)

    def _host(self, path: str) -> str:
        return self._root + os.path.normpath(os.path.join(self.spec.workdir, path))

    async def exec(
        self, command: str, *, timeout_s: float | None = None, cwd: str | None = None, stdin: bytes | None = None
    ) -> ExecResult:
        """As LocalSandbox.exec, but a time limit kills the process group only: a daemon in a new session escapes."""
        started = time.monotonic()
        place = self._host(cwd or ".")
        if not os.path.isdir(place) or not os.access(place, os.X_OK):  # an earlier command took it away
            return refused(f"sandbox: cannot enter {cwd or self.spec.workdir}\n".encode())
        process = await self._spawn(command, place, has_stdin=stdin is not None)
        self._groups.add(process.pid)
        limits = self.spec.limits
        out, err = _Capture(limits.output_bytes), _Capture(limits.output_bytes)
        limit_s = limits.command_s if timeout_s is None else timeout_s
        killed = await self._follow(process, out, err, stdin=stdin, limit_s=limit_s)
        code = process.returncode or 0
        code = 128 - code if code < 0 else code
        return ExecResult(
            exit_code=code,
            stdout=out.text(),
            stderr=err.text(),
            outcome=killed or ("nonzero" if code else "ok"),
            duration_s=time.monotonic() - started,
            stdout_bytes=out.total,
            stderr_bytes=err.total,
        )

    async def _spawn(self, command: str, cwd: str, *, has_stdin: bool) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                shell_path(),
                "-c",
                command,
                cwd=cwd,
                env={**environment(self.spec), "HOME": self._root, "TMPDIR": self._host("/tmp")},
                start_new_session=True,
                stdin=asyncio.subprocess.PIPE if has_stdin else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as err:
            raise SandboxError(f"a command could not be started: {err}") from err

    async def _follow(
        self,
        process: asyncio.subprocess.Process,
        out: _Capture,
        err: _Capture,
        *,
        stdin: bytes | None,
        limit_s: float,
    ) -> Outcome | None:
        """Feeds and reads until the process ends; returns the limit it was killed for."""
        killed: Outcome | None = None

        async def pump(stream: asyncio.StreamReader | None, capture: _Capture) -> None:
            nonlocal killed
            while stream is not None and (data := await stream.read(1 << 16)):
                capture.add(data)
                if out.total + err.total > self.spec.limits.output_kill_bytes and killed is None:
                    killed = "output_limit"
                    _kill_group(process.pid)

        pumps = [asyncio.ensure_future(pump(process.stdout, out)), asyncio.ensure_future(pump(process.stderr, err))]
        try:
            if process.stdin is not None:
                process.stdin.write(stdin or b"")
                process.stdin.close()
            await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            killed = "timeout"
            _kill_group(process.pid)
            await process.wait()
        finally:
            await asyncio.wait(pumps, timeout=_DRAIN_S)
            for task in pumps:
                task.cancel()
        return killed

    async def read_file(self, path: str) -> bytes:
        with open(self._host(path), "rb") as file:
            return file.read()

    async def write_file(self, path: str, data: bytes) -> None:
        host = self._host(path)
        os.makedirs(os.path.dirname(host), exist_ok=True)
        with open(host, "wb") as file:
            file.write(data)

    async def fork(self) -> BareSandbox:
        other = BareSandbox(self.spec)
        await other.start()
        workdir = other._host(self.spec.workdir)
        await asyncio.to_thread(shutil.rmtree, workdir)
        await asyncio.to_thread(shutil.copytree, self._host(self.spec.workdir), workdir, symlinks=True)
        return other

    async def close(self) -> None:
        for group in self._groups:
            _kill_group(group)
        self._groups.clear()
        if self._root:
            await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)
            self._root = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended
