"""The local sandbox: namespaces and an overlay made by a static launcher, one supervisor as PID 1, one socketpair.

Inside, commands run as uid 1000 with no capability, no_new_privs, a system call filter, no network but loopback, and
see only what base_root.py lists, the overlay at `workdir`, /tmp, /home/agent and /dev/shm. What they write is held in
one tmpfs of Limits.disk_bytes. Outside they are an unprivileged id (65521 when the owner is root, else the owner's).
Nothing is written to the host's file system, and everything ends with the supervisor: when this object is closed, the
owner dies (even by SIGKILL), or the lease is over.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import socket
import struct
from dataclasses import dataclass, field
from typing import Self

from swe_rl.errors import SandboxError, SandboxLost
from swe_rl.sandbox import wire
from swe_rl.sandbox.base_root import setup_body
from swe_rl.sandbox.cgroup import new_group, remove_when_empty
from swe_rl.sandbox.channel import Channel
from swe_rl.sandbox.launch import check_spec, failure_of, spawn
from swe_rl.types import ExecResult, SandboxSpec

READY_S = 20.0  # a loaded machine may need long; a healthy one needs milliseconds
REPLY_MARGIN_S = 15.0  # the supervisor enforces the limits; this guards against the supervisor itself
CLOSE_S = 5.0
MAX_FILE_BYTES = 256 << 20  # read_file refuses larger files
FILE_S = 60.0


@dataclass(slots=True)
class _Request:
    reply: asyncio.Future[wire.Frame]
    chunks: list[bytes] = field(default_factory=list)


class LocalSandbox:
    """Implements protocols.Sandbox. Make one with `open_sandbox` or `SandboxPool.lease`."""

    def __init__(self, spec: SandboxSpec, *, flags: int = 0, use_cgroup: bool = True) -> None:
        self.spec = spec
        self._flags = flags  # wire.FLAG_*: force a fallback
        self._use_cgroup = use_cgroup
        self._channel: Channel | None = None
        self._launcher = 0  # pid
        self._launcher_gone: asyncio.Future[None] | None = None
        self._ids = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._ended = ""  # why, once it has

    # ---- life -----------------------------------------------------------------------------------------------

    async def start(self, *, copy_from: int | None = None) -> Self:
        """Starts it and waits until it is ready. `copy_from` is a descriptor of an upper directory to copy.

        Raises SandboxUnavailable when this machine cannot make sandboxes, SandboxError for any other failure.
        """
        check_spec(self.spec)
        try:
            await self._start(copy_from)
        except TimeoutError as err:
            await self.close()
            raise SandboxError(f"the sandbox was not ready after {READY_S:.0f} s") from err
        except OSError as err:  # no descriptors, processes or memory left just now
            await self.close()
            raise SandboxError(f"the sandbox could not be started: {err}") from err
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self, copy_from: int | None) -> None:
        cgroup = new_group() if self._use_cgroup else None
        body = setup_body(self.spec, cgroup=cgroup, flags=self._flags)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._launcher = spawn(theirs)
            self._watch_launcher(cgroup[0] if cgroup else None)
            self._channel = Channel(ours, on_frame=self._on_frame, on_end=self._on_end)
        except BaseException:
            ours.close()
            raise
        ready = self._expect(0)
        try:
            fds = [] if copy_from is None else [copy_from]
            head, rest = (data := wire.frame(wire.SETUP, 0, body))[:12], data[12:]
            socket.send_fds(ours, [head], fds)
            self._channel.send(rest)
            frame = await asyncio.wait_for(ready, READY_S)
        finally:
            self._requests.pop(0, None)
        if frame.kind == wire.FAILED:
            raise failure_of(frame.body)

    async def close(self) -> None:
        """Ends the sandbox and waits until its processes and mounts are gone. Idempotent."""
        self._ended = self._ended or "the sandbox is closed"
        if self._channel is not None:
            self._channel.close()
        self._fail_requests()
        if self._launcher_gone is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._launcher_gone), CLOSE_S)
        except TimeoutError:
            if self._launcher:
                os.kill(self._launcher, signal.SIGKILL)  # PID 1 dies with it by its parent death signal
            await self._launcher_gone

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- requests -------------------------------------------------------------------------------------------

    async def exec(
        self, command: str, *, timeout_s: float | None = None, cwd: str | None = None, stdin: bytes | None = None
    ) -> ExecResult:
        """Runs `command` in a fresh shell (bash, not a login shell) and returns when that shell ends.

        Background jobs live on until the sandbox closes. At the time limit every process the command started is
        killed and the output so far is returned (outcome "timeout"). Without `stdin` it reads end of file at once.
        Raises SandboxLost when the sandbox ends meanwhile; a failing command is a result, not an exception.
        """
        encoded = command.encode("utf-8", "surrogateescape")
        if b"\0" in encoded:
            return wire.refused(b"sandbox: the command contains a NUL byte\n")
        if len(encoded) > wire.MAX_BODY // 2:
            return wire.refused(b"sandbox: the command is longer than 4 MiB\n")
        limits = self.spec.limits
        limit_s = limits.command_s if timeout_s is None else timeout_s
        body = wire.exec_body(
            wire.SHELL,
            encoded,
            cwd=self._resolve(cwd or self.spec.workdir),
            timeout_s=limit_s,
            keep_bytes=limits.output_bytes,
            kill_bytes=limits.output_kill_bytes,
            has_data=stdin is not None,
        )
        frame, _ = await self._call(wire.EXEC, body, data=stdin, limit_s=limit_s)
        return wire.parse_result(frame.body)

    async def read_file(self, path: str) -> bytes:
        """Content of a regular file, read with a command's rights; relative to `workdir`.

        Raises OSError as open() would (FileNotFoundError, PermissionError, IsADirectoryError, EFBIG over 256 MiB).
        """
        frame, chunks = await self._file_call(wire.READ, path, None)
        _raise_errno(frame.body, path)
        return b"".join(chunks)

    async def write_file(self, path: str, data: bytes) -> None:
        """Creates or overwrites a regular file, and its parent directories, with a command's rights.

        Raises OSError as open() and write() would; a full disk is ENOSPC.
        """
        frame, _ = await self._file_call(wire.WRITE, path, data)
        _raise_errno(frame.body, path)

    async def fork(self) -> LocalSandbox:
        """A new sandbox of the same spec with a copy of everything written under `workdir`.

        Processes, /tmp, /home and shared memory are not copied. The lease starts anew.
        """
        request_id = next(self._ids)
        await self._call(wire.SNAPSHOT, b"", limit_s=FILE_S, request_id=request_id)
        assert self._channel is not None
        upper = self._channel.passed_fds.popleft()
        try:
            return await LocalSandbox(self.spec, flags=self._flags, use_cgroup=self._use_cgroup).start(copy_from=upper)
        finally:
            os.close(upper)

    async def ping(self) -> int:
        """Number of processes alive beside the supervisor (background jobs, and commands in flight)."""
        frame, _ = await self._call(wire.PING, b"", limit_s=REPLY_MARGIN_S)
        return struct.unpack("<I", frame.body)[0]

    # ---- plumbing -------------------------------------------------------------------------------------------

    def _resolve(self, path: str) -> str:
        return os.path.join(self.spec.workdir, path)

    async def _file_call(self, kind: int, path: str, data: bytes | None) -> tuple[wire.Frame, list[bytes]]:
        name = path.encode("utf-8", "surrogateescape")
        if b"\0" in name or not name:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        body = wire.exec_body(
            kind,
            name,
            cwd=self.spec.workdir,
            timeout_s=FILE_S,
            keep_bytes=4096,
            kill_bytes=MAX_FILE_BYTES,
            has_data=data is not None,
        )
        return await self._call(wire.EXEC, body, data=data, limit_s=FILE_S)

    async def _call(
        self, kind: int, body: bytes, *, limit_s: float, data: bytes | None = None, request_id: int = 0
    ) -> tuple[wire.Frame, list[bytes]]:
        request_id = request_id or next(self._ids)
        if self._channel is None or self._ended:
            raise SandboxLost(self._ended or "the sandbox was not started")
        reply = self._expect(request_id)
        request = self._requests[request_id]
        try:
            if data is not None:
                view = memoryview(data)
                for start in range(0, max(len(data), 1), wire.DATA_PIECE):
                    self._channel.send(wire.frame(wire.DATA, request_id, bytes(view[start : start + wire.DATA_PIECE])))
            self._channel.send(wire.frame(kind, request_id, body))
            frame = await asyncio.wait_for(reply, limit_s + REPLY_MARGIN_S)
        except TimeoutError as err:
            self._on_end("the supervisor does not answer")
            raise SandboxLost(self._ended) from err
        except asyncio.CancelledError:
            if kind == wire.EXEC and not self._ended:
                self._channel.send(wire.frame(wire.KILL, request_id))  # nobody waits for it any more
            raise
        finally:
            self._requests.pop(request_id, None)
        return frame, request.chunks

    def _expect(self, request_id: int) -> asyncio.Future[wire.Frame]:
        future: asyncio.Future[wire.Frame] = asyncio.get_running_loop().create_future()
        self._requests[request_id] = _Request(future)
        return future

    def _on_frame(self, frame: wire.Frame) -> None:
        if frame.kind == wire.ENDED:
            self._ended = f"the sandbox ended: {frame.body.decode(errors='replace')}"
            return
        request = self._requests.get(frame.request_id)
        if request is None:  # its caller was cancelled
            return
        if frame.kind == wire.CHUNK:
            request.chunks.append(frame.body)
        elif not request.reply.done():
            request.reply.set_result(frame)

    def _on_end(self, reason: str) -> None:
        self._ended = self._ended or reason
        if self._channel is not None:
            self._channel.close()
        self._fail_requests()

    def _fail_requests(self) -> None:
        for request in self._requests.values():
            if not request.reply.done():
                request.reply.set_exception(SandboxLost(self._ended))

    def _watch_launcher(self, cgroup: str | None) -> None:
        """Reaps the launcher when it exits; asyncio's own child watcher would cost a thread per sandbox."""
        loop = asyncio.get_running_loop()
        try:
            pid_fd = os.pidfd_open(self._launcher)
        except OSError:
            os.kill(self._launcher, signal.SIGKILL)  # it has started nothing yet
            os.waitpid(self._launcher, 0)
            raise
        gone = self._launcher_gone = loop.create_future()

        def exited() -> None:
            loop.remove_reader(pid_fd)
            os.close(pid_fd)
            try:
                os.waitpid(self._launcher, 0)
            except ChildProcessError:
                pass  # somebody in this process waits for all children
            self._launcher = 0
            if cgroup:
                remove_when_empty(cgroup)
            if not gone.done():
                gone.set_result(None)

        loop.add_reader(pid_fd, exited)


def _raise_errno(body: bytes, path: str) -> None:
    result = wire.parse_result(body)
    if result.outcome == "ok":
        return
    codes = {"timeout": errno.ETIMEDOUT, "output_limit": errno.EFBIG, "oom": errno.ENOMEM, "pids_limit": errno.EAGAIN}
    code = codes.get(result.outcome) or (result.exit_code if result.exit_code not in (126, 137) else errno.EIO)
    raise OSError(code, os.strerror(code), path)
