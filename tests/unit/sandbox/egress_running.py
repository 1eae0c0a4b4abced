"""A proxy on this machine's loopback, and how to speak with it."""

from __future__ import annotations

import asyncio
import socket

from swe_rl.sandbox.egress import EgressProxy


async def talk(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


class Running:
    """A proxy that listens on this machine's loopback."""

    def __init__(self, *allowed: str) -> None:
        self.allowed = allowed

    async def __aenter__(self) -> tuple[EgressProxy, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self.proxy = EgressProxy(listener.detach(), self.allowed)
        return self.proxy, port

    async def __aexit__(self, *exc: object) -> None:
        self.proxy.close()
        self.proxy.close()


async def talk_raw(port: int, request: bytes) -> bytes:
    """Without asking for an address."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, request)
        data = b""
        while piece := await asyncio.wait_for(loop.sock_recv(sock, 4096), 10):
            data += piece
        return data
