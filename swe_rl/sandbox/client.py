"""The owner's side of every supervisor: requests over one stream of frames, whatever carries the stream.

A subclass makes the sandbox and says how bytes are sent. Local sandboxes use a socketpair and end with it; a container
calls back over a socket, and its stream may break and be opened again in the middle of anything.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Self

from swe_rl.errors import ConfigError, SandboxError, SandboxLost
from swe_rl.sandbox import wire
from swe_rl.types import ExecResult, SandboxSpec

REPLY_MARGIN_S = 15.0  # the supervisor enforces the limits; this guards against the supervisor itself
MAX_FILE_BYTES = 256 << 20  # read_file refuses larger files
FILE_S = 60.0


def check_spec(spec: SandboxSpec) -> None:
    """Raises ConfigError for a spec that no supervisor can honour, SandboxError for a layer that is not there."""
    if not spec.workdir.startswith("/") or os.path.normpath(spec.workdir) in ("/", "/tmp", "/proc", "/dev"):
        raise ConfigError(f"SandboxSpec.workdir={spec.workdir!r} must be an absolute directory of its own, as /testbed")
    if spec.limits.output_bytes > wire.MAX_KEEP:
        raise ConfigError(f"Limits.output_bytes={spec.limits.output_bytes} is too large: at most {wire.MAX_KEEP}")
    missing = [layer for layer in spec.layers if not os.path.isdir(layer)]
    if missing:
        raise SandboxError(f"layer {missing[0]!r} is not a directory")


@dataclass(slots=True)
class Request:
    """One that has no answer yet."""

    reply: asyncio.Future[wire.Frame]
    frames: list[bytes] = field(default_factory=list)  # as sent, for sending again
    chunks: list[bytes] = field(default_factory=list)  # pieces of a file that is being read


class SandboxClient(ABC):
    """The requests of protocols.Sandbox, once there is a stream."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self._ids = itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._ended = ""  # why, once it has
        self._from_inside = False  # see errors.SandboxLost

    @abstractmethod
    def _send(self, data: bytes) -> None:
        """Queues bytes for the supervisor. Raises SandboxLost when there is none any more."""

    def _send_note(self, data: bytes) -> None:
        """Sends what has no answer."""
        self._send(data)

    @abstractmethod
    def _abandon(self, reason: str) -> None:
        """The supervisor is gone or of no use: gives up the stream and fails what waits for an answer."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the sandbox and waits until its processes and mounts are gone. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

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
            cwd=os.path.join(self.spec.workdir, cwd) if cwd else self.spec.workdir,
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

    async def ping(self) -> int:
        """Number of processes alive beside the supervisor (background jobs, and commands in flight)."""
        frame, _ = await self._call(wire.PING, b"", limit_s=REPLY_MARGIN_S)
        return struct.unpack("<I", frame.body)[0]

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
        self, kind: int, body: bytes, *, limit_s: float, data: bytes | None = None
    ) -> tuple[wire.Frame, list[bytes]]:
        if self._ended:
            raise SandboxLost(self._ended)
        request_id = next(self._ids)
        request = self._expect(request_id)
        request.frames = _frames(kind, request_id, body, data)
        try:
            for piece in request.frames:
                self._send(piece)
            frame = await asyncio.wait_for(request.reply, limit_s + REPLY_MARGIN_S)
        except TimeoutError as err:
            self._abandon("the supervisor does not answer")
            raise SandboxLost(self._ended) from err
        except asyncio.CancelledError:
            if kind == wire.EXEC and not self._ended:
                self._send_note(wire.frame(wire.KILL, request_id))  # nobody waits for it any more
            raise
        finally:
            self._requests.pop(request_id, None)
        return frame, request.chunks

    def _expect(self, request_id: int) -> Request:
        request = self._requests[request_id] = Request(asyncio.get_running_loop().create_future())
        return request

    def _on_frame(self, frame: wire.Frame) -> None:
        if frame.kind == wire.ENDED:
            self._ended = self._ended or f"the sandbox ended: {frame.body.decode(errors='replace')}"
            return
        request = self._requests.get(frame.request_id)
        if request is None:  # its caller was cancelled
            return
        if frame.kind == wire.CHUNK:
            request.chunks.append(frame.body)
        elif not request.reply.done():
            request.reply.set_result(frame)

    def _fail_requests(self) -> None:
        for request in self._requests.values():
            if not request.reply.done():
                request.reply.set_exception(SandboxLost(self._ended, from_inside=self._from_inside))


def _frames(kind: int, request_id: int, body: bytes, data: bytes | None) -> list[bytes]:
    """The content in pieces, then the request that uses it."""
    view = memoryview(data or b"")
    starts = range(0, max(len(view), 1), wire.DATA_PIECE) if data is not None else ()
    pieces = [wire.frame(wire.DATA, request_id, bytes(view[at : at + wire.DATA_PIECE])) for at in starts]
    return [*pieces, wire.frame(kind, request_id, body)]


def _raise_errno(body: bytes, path: str) -> None:
    result = wire.parse_result(body)
    if result.outcome == "ok":
        return
    codes = {"timeout": errno.ETIMEDOUT, "output_limit": errno.EFBIG, "oom": errno.ENOMEM, "pids_limit": errno.EAGAIN}
    code = codes.get(result.outcome) or (result.exit_code if result.exit_code not in (126, 137) else errno.EIO)
    raise OSError(code, os.strerror(code), path)
