"""The socket at which the supervisor of one container calls."""

from __future__ import annotations

import asyncio
import hmac
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from swe_rl.errors import ConfigError
from swe_rl.sandbox import wire
from swe_rl.sandbox.docker.labels import pid_namespace
from swe_rl.sandbox.owner import owner_label

PREFIX = "swe-rl-door-"  # of directories: PREFIX, the PID namespace, the owner's label, something random
SOCKET_NAME = "owner"
NONCE_SIZE, BOOT_ID_SIZE = 64, 32  # characters
MAX_STRANGERS = 4  # connections that have not shown the nonce
STRANGER_S = 10.0
_MAX_PATH = 107  # bytes of a Unix socket's name
_HEAD = wire.frame(wire.HELLO, 0, bytes(NONCE_SIZE + BOOT_ID_SIZE))[:12]
_GREETING_SIZE = len(_HEAD) + NONCE_SIZE + BOOT_ID_SIZE


@dataclass(slots=True)
class _Stranger:
    pid: int
    patience: asyncio.TimerHandle
    said: bytearray = field(default_factory=bytearray)


class Door:
    """Listens in a directory of its own; `on_enter(connection, boot_id, pid)` gets each one that shows the nonce.

    `pid` is the supervisor's, 0 when its namespace does not let us see it. Of a stranger no more is read than a
    greeting, and no descriptor is taken. The directory is closed to other users; `shared`, inside it, is what the
    container sees. Belongs to the event loop that is running when it is made.
    """

    def __init__(self, nonce: str, *, on_enter: Callable[[socket.socket, str, int], None]) -> None:
        self._nonce = nonce.encode()
        self._on_enter = on_enter
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[socket.socket, _Stranger] = {}
        self.refused = 0  # connections that showed no nonce or a wrong one
        self.directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{pid_namespace()}-{owner_label()}-"))
        try:
            self._listen()
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        self._loop.add_reader(self._socket.fileno(), self._accept)

    @property
    def shared(self) -> Path:
        """Mounted into the container, read-only."""
        return self.directory / "shared"

    def _listen(self) -> None:
        self.shared.mkdir(mode=0o755)
        path = str(self.shared / SOCKET_NAME)
        if len(os.fsencode(path)) > _MAX_PATH:
            raise ConfigError(f"TMPDIR={tempfile.gettempdir()} is too long for a socket: set it to a shorter path")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(path)
            os.chmod(path, 0o600)  # the supervisor may override this, a command may not
            self._socket.listen(MAX_STRANGERS)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Idempotent. Connections that have entered stay open."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        for connection in list(self._strangers):
            self._send_away(connection)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return  # it hung up already, or no descriptor is free: the supervisor tries again
        if len(self._strangers) >= MAX_STRANGERS:
            self.refused += 1
            connection.close()
            return
        connection.setblocking(False)
        pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        patience = self._loop.call_later(STRANGER_S, self._send_away, connection)
        self._strangers[connection] = _Stranger(pid, patience)
        self._loop.add_reader(connection.fileno(), self._hear, connection)

    def _hear(self, connection: socket.socket) -> None:
        stranger = self._strangers[connection]
        try:
            data = connection.recv(_GREETING_SIZE - len(stranger.said))  # drops descriptors that come along
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        said = stranger.said
        said += data
        if not data or said[: len(_HEAD)] != _HEAD[: len(said)]:
            self._send_away(connection)
        elif len(said) == _GREETING_SIZE:
            nonce, boot_id = said[len(_HEAD) : -BOOT_ID_SIZE], said[-BOOT_ID_SIZE:]
            if hmac.compare_digest(bytes(nonce), self._nonce):
                self._forget(connection)
                self._on_enter(connection, boot_id.decode(errors="replace"), stranger.pid)
            else:
                self._send_away(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._strangers.pop(connection).patience.cancel()
        self._loop.remove_reader(connection.fileno())

    def _send_away(self, connection: socket.socket) -> None:
        self._forget(connection)
        self.refused += 1
        connection.close()
