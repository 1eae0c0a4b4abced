"""Allowed hosts, and nothing else, from inside a sandbox: over its own loopback, out by the owner's proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import sandbox_faults
from sandbox_backends import Opener

from swe_rl.protocols import Sandbox
from swe_rl.sandbox.egress import PORT


@dataclass
class Site:
    """A server of the host's loopback that says what it was asked."""

    port: int = 0
    heads: list[bytes] = field(default_factory=list)

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello\n")
            await writer.drain()
            await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    site = Site()
    server = await asyncio.start_server(site.answer, "127.0.0.1", 0)
    site.port = server.sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.close()


async def said(sandbox: Sandbox, *requests: str, port: int = PORT) -> str:
    """All that one connection of a shell to its own loopback gets back; each request waits for the answer's start."""
    steps = [f"printf '{text}' >&3; read -r -t 5 line <&3; echo \"$line\"" for text in requests]
    command = f"exec 3<>/dev/tcp/127.0.0.1/{port} || exit 7; {'; '.join(steps)}; timeout 2 cat <&3; true"
    result = await sandbox.exec(f"bash -c {_quoted(command)}", timeout_s=20)
    return f"{result.exit_code}: {result.stdout.decode()}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


async def test_listed_hosts_and_no_others_are_reached(opener: Opener) -> None:
    get = "GET /a HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"
    async with serving() as site, serving() as other:
        async with await opener(replace(sandbox_faults.SPEC, egress=(site.place,))) as sandbox:
            tunnel = await said(sandbox, f"CONNECT {site.place} HTTP/1.1\\r\\n\\r\\n", get)
            assert tunnel.startswith("0: HTTP/1.1 200 Connection established"), tunnel
            assert "hello" in tunnel
            assert site.heads == [b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"]
            fields = "Host: other.example\\r\\nProxy-Connection: x\\r\\nA: 1"
            assert "hello" in await said(sandbox, f"GET http://{site.place}/b HTTP/1.1\\r\\n{fields}\\r\\n\\r\\n")
            want = f"GET /b HTTP/1.1\r\nHost: {site.place}\r\nConnection: close\r\nA: 1\r\n\r\n"
            assert site.heads[1:] == [want.encode()]
            for request in (f"CONNECT {other.place} HTTP/1.1", f"GET http://{other.place}/ HTTP/1.1"):
                answer = await said(sandbox, f"{request}\\r\\n\\r\\n")
                assert "403 Forbidden\r\n" in answer, answer
                assert f"sandbox: {other.place} is not among the allowed hosts" in answer
            assert "400 Bad Request" in await said(sandbox, "hello\\r\\n\\r\\n")
            assert (await said(sandbox, "x", port=site.port)).startswith("7:")  # there is no other way
            assert other.heads == []
            fork = await sandbox.fork()
            async with fork:
                assert "200 Connection established" in await said(fork, f"CONNECT {site.place} HTTP/1.1\\r\\n\\r\\n")
            result = await sandbox.exec("echo $HTTPS_PROXY $http_proxy $NO_PROXY")
            proxy = f"http://127.0.0.1:{PORT}"
            assert result.stdout.decode() == f"{proxy} {proxy} localhost,127.0.0.1,::1\n"


async def test_without_a_list_there_is_no_proxy_and_it_ends_with_the_sandbox(opener: Opener) -> None:
    async with await opener(sandbox_faults.SPEC) as sandbox:
        assert (await said(sandbox, "x")).startswith("7:")
        assert (await sandbox.exec("echo $HTTPS_PROXY$http_proxy")).stdout == b"\n"
    async with serving() as site:
        sandbox = await opener(replace(sandbox_faults.SPEC, egress=(site.place,)))
        ask = f"printf 'CONNECT {site.place} HTTP/1.1\\r\\n\\r\\n' >&3"
        held = f"exec 3<>/dev/tcp/127.0.0.1/{PORT}; {ask}; cat <&3"
        waiting = asyncio.ensure_future(sandbox.exec(f"bash -c {_quoted(held)}", timeout_s=30))
        proxy = sandbox._egress
        while not proxy.counts["egress_opened"]:
            await asyncio.sleep(0.01)
        await sandbox.close()
        await asyncio.wait([waiting])
        assert waiting.exception() is not None
        while proxy._writers or proxy._tasks:  # a connection that stayed open would keep the network namespace
            await asyncio.sleep(0.01)
        assert proxy._listener.fileno() == -1
