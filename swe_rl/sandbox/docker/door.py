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
from pathlib import Path

from swe_rl.errors import ConfigError
from swe_rl.sandbox import wire
from swe_rl.sandbox.channel import Channel
from swe_rl.sandbox.owner import owner_label

PREFIX = "swe-rl-docker-"
SOCKET_NAME = "owner"
NONCE_SIZE = 64  # characters
MAX_STRANGERS = 4  # connections that have not shown the nonce
STRANGER_S = 10.0
_MAX_PATH = 107  # bytes of a Unix socket's name


class Door:
    """Listens in a directory of its own; `on_enter(channel, boot_id, pid)` gets each connection that shows the nonce.

    `pid` is the supervisor's, 0 when its namespace does not let us see it. The directory is closed to other users;
    `shared`, inside it, is what the container sees. Belongs to the event loop that is running when it is made.
    """

    def __init__(self, nonce: str, *, on_enter: Callable[[Channel, str, int], None]) -> None:
        self._nonce = nonce.encode()
        self._on_enter = on_enter
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[Channel, asyncio.TimerHandle] = {}
        self.refused = 0  # connections that showed no nonce or a wrong one
        self.directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner_label()}-"))
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
        """Idempotent. Channels that have entered stay open."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        for stranger in list(self._strangers):
            self._send_away(stranger)
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
        pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        channel = Channel(
            connection,
            on_frame=lambda frame: self._greet(channel, frame, pid),
            on_end=lambda _: self._send_away(channel),
        )
        self._strangers[channel] = self._loop.call_later(STRANGER_S, self._send_away, channel)

    def _greet(self, channel: Channel, frame: wire.Frame, pid: int) -> None:
        if channel not in self._strangers:
            return
        nonce, boot_id = frame.body[:NONCE_SIZE], frame.body[NONCE_SIZE:]
        if frame.kind != wire.HELLO or not hmac.compare_digest(nonce, self._nonce):
            self._send_away(channel)
            return
        self._strangers.pop(channel).cancel()
        self._on_enter(channel, boot_id.decode(errors="replace"), pid)

    def _send_away(self, channel: Channel) -> None:
        timer = self._strangers.pop(channel, None)
        if timer is not None:
            timer.cancel()
            self.refused += 1
            channel.close()
