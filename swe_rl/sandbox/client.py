"""The owner's side of every supervisor: requests over one stream of frames, whatever carries the stream.

A subclass makes the sandbox and says how bytes are sent. Local sandboxes use a socketpair and end with it; a container
calls back over a socket, and its stream may break and be opened again in the middle of anything.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import math
import os
import struct
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from swe_rl.errors import ConfigError, SandboxError, SandboxLost
from swe_rl.sandbox import wire
from swe_rl.sandbox.channel import Channel
from swe_rl.sandbox.egress import PORT, EgressProxy
from swe_rl.types import ExecResult, SandboxSpec

REPLY_MARGIN_S = 15.0  # the supervisor enforces the limits; this guards against the supervisor itself
MAX_FILE_BYTES = 256 << 20  # read_file refuses larger files
FILE_S = 60.0
_MAX_PATH = 4095  # bytes, of the kernel


@dataclass(slots=True)
class Request:
    """One that has no answer yet."""

    reply: asyncio.Future[wire.Frame]
    frames: list[bytes] = field(default_factory=list)  # as sent, for sending again
    chunks: list[bytes] = field(default_factory=list)  # pieces of a file that is being read
    descriptor: int = -1  # came with the answer; whoever takes it closes it

    @property
    def answer(self) -> bytes:
        return self.reply.result().body


class SandboxClient(ABC):
    """The requests of protocols.Sandbox, once there is a stream."""

    ready_s: float  # how long a start may take

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self._ids = itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._channel: Channel | None = None
        self._ended = ""  # why, once it has
        self._from_inside = False  # see errors.SandboxLost
        self._egress: EgressProxy | None = None

    async def start(self, *, copy_from: int | None = None) -> Self:
        """Starts it and waits until it is ready. `copy_from` is a descriptor of a directory to begin with a copy of.

        Raises SandboxUnavailable when this machine has no such sandboxes, ConfigError for a spec that cannot be
        honoured, SandboxError for any other failure.
        """
        self._check_spec()
        try:
            await self._start(copy_from)
            await self._open_egress()
        except TimeoutError as err:
            await asyncio.shield(self.close())
            raise SandboxError(f"the sandbox was not ready after {self.ready_s:.0f} s") from err
        except OSError as err:  # no descriptors, processes, disk or memory left just now
            await asyncio.shield(self.close())
            raise SandboxError(f"the sandbox could not be started: {err}") from err
        except BaseException:
            await asyncio.shield(self.close())
            raise
        return self

    @property
    def counts(self) -> Counter[str]:
        """Connections to allowed hosts so far, see egress.py; kept after the end."""
        return self._egress.counts if self._egress is not None else Counter()

    @abstractmethod
    def _check_spec(self) -> None:
        """Completes `self.spec`, or refuses it."""

    @abstractmethod
    async def _start(self, copy_from: int | None) -> None:
        """What `start` does, in whatever way it fails; `start` closes then."""

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
        limits = self.spec.limits
        limit_s = limits.command_s if timeout_s is None else timeout_s
        if math.isnan(limit_s):
            raise ConfigError("timeout_s=nan must be a number of seconds")
        encoded, place = wire.encoded(command), os.path.join(self.spec.workdir, cwd) if cwd else self.spec.workdir
        why = _no_command(encoded) or _no_directory(place)
        if why or encoded is None:
            return wire.refused(b"sandbox: %s\n" % why)
        body = wire.exec_body(
            wire.SHELL,
            encoded,
            cwd=place,
            timeout_s=limit_s,
            keep_bytes=limits.output_bytes,
            kill_bytes=limits.output_kill_bytes,
            has_data=stdin is not None,
        )
        request = await self._call(wire.EXEC, body, data=stdin, limit_s=limit_s)
        return wire.parse_result(request.answer)

    async def read_file(self, path: str) -> bytes:
        """Content of a regular file, read with a command's rights; relative to `workdir`.

        Raises OSError as open() would (FileNotFoundError, PermissionError, IsADirectoryError, EFBIG over 256 MiB).
        """
        request = await self._file_call(wire.READ, path, None)
        _raise_errno(request.answer, path)
        return b"".join(request.chunks)

    async def write_file(self, path: str, data: bytes) -> None:
        """Creates or overwrites a regular file, and its parent directories, with a command's rights.

        Raises OSError as open() and write() would; a full disk is ENOSPC.
        """
        request = await self._file_call(wire.WRITE, path, data)
        _raise_errno(request.answer, path)

    async def ping(self) -> int:
        """Number of processes alive beside the supervisor (background jobs, and commands in flight)."""
        request = await self._call(wire.PING, b"", limit_s=REPLY_MARGIN_S)
        return struct.unpack("<I", request.answer)[0]

    async def _snapshot(self) -> int:
        """A descriptor of what was written under `workdir`; the caller closes it."""
        return await self._descriptor(wire.SNAPSHOT, b"")

    async def _open_egress(self) -> None:
        """The way to the hosts that the spec allows; none without any."""
        if self.spec.egress:
            listener = await self._descriptor(wire.LISTEN, wire.listen_body(PORT))
            self._egress = EgressProxy(listener, self.spec.egress)

    async def _descriptor(self, kind: int, body: bytes) -> int:
        """One that the supervisor passes; the caller closes it."""
        request = await self._call(kind, body, limit_s=FILE_S)
        if request.descriptor >= 0:
            return request.descriptor
        if request.reply.result().kind == wire.RESULT:
            why = wire.parse_result(request.answer).stderr.decode(errors="replace")
            raise SandboxError(f"the supervisor has no socket for the allowed hosts: {why}")
        raise SandboxError("no descriptor is free: raise the limit of open files (ulimit -n)")

    async def _file_call(self, kind: int, path: str, data: bytes | None) -> Request:
        name = wire.encoded(path)
        if name is None:
            raise OSError(errno.EILSEQ, os.strerror(errno.EILSEQ), path)
        if b"\0" in name or not name:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        if len(name) > _MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path[:100])
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

    async def _call(self, kind: int, body: bytes, *, limit_s: float, data: bytes | None = None) -> Request:
        if self._ended:
            raise SandboxLost(self._ended)
        request_id = next(self._ids)
        request = self._expect(request_id)
        request.frames = _frames(kind, request_id, body, data)
        try:
            for piece in request.frames:
                self._send(piece)
            await asyncio.wait_for(request.reply, limit_s + REPLY_MARGIN_S)
        except TimeoutError as err:
            self._abandon("the supervisor does not answer")
            raise SandboxLost(self._ended) from err
        except asyncio.CancelledError:
            if kind == wire.EXEC and not self._ended:
                self._send_note(wire.frame(wire.KILL, request_id))  # nobody waits for it any more
            if request.descriptor >= 0:
                os.close(request.descriptor)
            raise
        finally:
            self._requests.pop(request_id, None)
        return request

    def _expect(self, request_id: int) -> Request:
        request = self._requests[request_id] = Request(asyncio.get_running_loop().create_future())
        return request

    def _on_frame(self, frame: wire.Frame) -> None:
        if frame.kind == wire.ENDED:
            self._ended = self._ended or f"the sandbox ended: {frame.body.decode(errors='replace')}"
            return
        request = self._requests.get(frame.request_id)
        if frame.kind == wire.PASSED and self._channel is not None and self._channel.passed_fds:
            descriptor = self._channel.passed_fds.popleft()
            if request is None or request.reply.done():
                os.close(descriptor)
            else:
                request.descriptor = descriptor
        if request is None:  # its caller was cancelled
            return
        if frame.kind == wire.CHUNK:
            request.chunks.append(frame.body)
        elif not request.reply.done():
            request.reply.set_result(frame)

    def _fail_requests(self) -> None:
        """With the sandbox its requests end, and its way out."""
        if self._egress is not None:
            self._egress.close()
        for request in self._requests.values():
            if not request.reply.done():
                request.reply.set_exception(SandboxLost(self._ended, from_inside=self._from_inside))


def _no_command(encoded: bytes | None) -> bytes:
    """Why it cannot be run, b"" if it can."""
    if encoded is None:
        return b"the command contains half a surrogate pair, which is no character"
    if b"\0" in encoded:
        return b"the command contains a NUL byte"
    return b"the command is longer than 4 MiB" if len(encoded) > wire.MAX_BODY // 2 else b""


def _no_directory(path: str) -> bytes:
    """Why it cannot be one, b"" if it can."""
    encoded = wire.encoded(path)
    fits = encoded is not None and b"\0" not in encoded and len(encoded) <= _MAX_PATH
    return b"" if fits else b"the work directory cannot be a path"


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
