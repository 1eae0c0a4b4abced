"""One connection to a supervisor: frames and passed descriptors over a Unix socket, without a thread."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from swe_rl.errors import SandboxLost
from swe_rl.sandbox.wire import Frame, FrameReader

STREAM_ENDED = "the sandbox's stream ended"  # without a word of the supervisor
_READ_SIZE = 256 << 10
_FIRST_BYTES = 12  # a header always fits the socket's buffer
_FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize * 4)


class Channel:
    """Sends bytes in order and hands every received frame to `on_frame`; calls `on_end` once when the peer is gone.

    Belongs to the event loop that is running when it is made.
    """

    def __init__(
        self, sock: socket.socket, *, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._reader = FrameReader()
        self._pending: deque[memoryview] = deque()
        self._loop = asyncio.get_running_loop()
        self._open = True
        self.passed_fds: deque[int] = deque()  # descriptors received, in order; whoever takes one closes it
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, data: bytes) -> None:
        """Queues `data`. Raises SandboxLost when the connection has ended."""
        if not self._open:
            raise SandboxLost("the sandbox has ended")
        idle = not self._pending
        self._pending.append(memoryview(data))
        if idle:
            self._flush()
            if self._open and self._pending:
                self._loop.add_writer(self._sock.fileno(), self._writable)

    def send_with(self, data: bytes, fds: Sequence[int]) -> None:
        """Sends `data`, descriptors with its first bytes; nothing may be waiting. OSError when the socket refuses."""
        sent = socket.send_fds(self._sock, [data[:_FIRST_BYTES]], list(fds), socket.MSG_NOSIGNAL)
        self.send(data[sent:])

    def close(self) -> None:
        """Closes the connection, which ends a local sandbox. Idempotent; `on_end` is not called."""
        if not self._open:
            return
        self._open = False
        self._pending.clear()
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        while self.passed_fds:
            os.close(self.passed_fds.popleft())

    def _flush(self) -> None:
        while self._pending:
            piece = self._pending[0]
            try:
                sent = self._sock.send(piece, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._pending.clear()  # the reader sees the end of the stream, and the reason sent before it
                return
            if sent < len(piece):
                self._pending[0] = piece[sent:]
            else:
                self._pending.popleft()

    def _writable(self) -> None:
        self._flush()
        if not self._pending:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(_READ_SIZE, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as err:
            self._finish(f"the sandbox's stream broke: {err.strerror}")
            return
        for level, kind, value in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
                self.passed_fds.extend(fds)
        if not data:
            self._finish(STREAM_ENDED)
            return
        try:
            for frame in self._reader.feed(data):
                self._on_frame(frame)
        except SandboxLost as err:
            self._finish(str(err))

    def _finish(self, reason: str) -> None:
        if self._open:
            self.close()
            self._on_end(reason)
