"""Which addresses the proxy of allowed hosts will not touch, and how it learns them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

import pytest
from egress_running import Running, talk_raw

from swe_rl.sandbox import egress


def own_addresses() -> list[str]:
    """Of this machine beside its loopback, in both forms; none where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return [probe.getsockname()[0], f"::ffff:{probe.getsockname()[0]}"]
    return []


def resolved_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Every name leads there; returns the names that are asked for."""
    asked: list[str] = []

    def found(host: str, port: int, *given: Any, **options: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return asked


INSIDE = [
    *("127.0.0.1", "127.8.8.8", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1", "64:ff9b::7f00:1"),  # this machine
    *("10.1.2.3", "172.16.0.1", "172.31.255.254", "192.168.0.1", "fc00::1", "fec0::1", "::ffff:10.1.2.3"),  # private
    *("100.64.0.1", "64:ff9b::a01:203", "2002:a01:203::1"),  # shared by a provider's customers; in words of IPv6
    *("169.254.0.1", "fe80::1", "fe80::1%1"),  # of the link
    *("169.254.169.254", "169.254.170.2", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd00:ec2::254"),  # clouds
    *("::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"),
    *("224.0.0.1", "ff02::1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "2001:db8::1"),  # nobody's
]


async def test_a_name_leads_to_no_address_that_is_not_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns a listed name may point it anywhere: at what listens here or next door, or at a cloud's secrets."""

    async def connect(*given: Any, **options: Any) -> Any:
        raise AssertionError(f"it went to {given[0]}")

    async with Running("inside.example:80", "127.0.0.1:1") as (proxy, port):
        monkeypatch.setattr(egress.asyncio, "open_connection", open_but(connect, asyncio.open_connection))
        addresses = [*INSIDE, *own_addresses()]
        for address in addresses:
            asked = resolved_to(monkeypatch, address)
            answer = await talk_raw(port, b"CONNECT inside.example:80 HTTP/1.1\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 403 Forbidden"), address
            assert b"inside.example has no public address: list the address that is meant" in answer
            assert asked == ["inside.example"]
        assert proxy.counts == {"egress_refused": len(addresses)}


def open_but(connect: Any, original: Any) -> Any:
    """asyncio.open_connection that takes up accepted sockets and gives the others to `connect`."""

    async def opened(*given: Any, **options: Any) -> Any:
        return await (original if "sock" in options else connect)(*given, **options)

    return opened


@pytest.mark.parametrize(
    ("addresses", "listed", "tried"),
    [
        (["93.184.215.14", "10.0.0.7", "2606:2800:21f::1"], (), ["93.184.215.14", "2606:2800:21f::1"]),
        (["64:ff9b::5db8:d70e"], (), ["64:ff9b::5db8:d70e"]),  # 93.184.215.14 from a network without IPv4
        (["10.0.0.7", "10.0.0.8"], ("10.0.0.8:443",), ["10.0.0.8"]),
        (["10.0.0.7"], ("10.0.0.7:80",), []),  # another port
        (["fd00::7"], ("[FD00:0::7]:443",), ["fd00::7"]),
    ],
)
async def test_public_addresses_and_listed_ones_are_tried_in_order(
    addresses: list[str], listed: tuple[str, ...], tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    async def connect(address: str, port: int, **options: Any) -> Any:
        seen.append(address)
        raise OSError("nobody answers")

    resolved_to(monkeypatch, *addresses)
    async with Running("files.example:443", *listed) as (proxy, port):
        monkeypatch.setattr(egress.asyncio, "open_connection", open_but(connect, asyncio.open_connection))
        answer = await talk_raw(port, b"CONNECT files.example:443 HTTP/1.1\r\n\r\n")
    assert seen == tried
    assert answer.startswith(b"HTTP/1.1 502 Bad Gateway" if tried else b"HTTP/1.1 403 Forbidden")
    assert proxy.counts == {"egress_unreached" if tried else "egress_refused": 1}


async def test_an_address_that_is_silent_leaves_time_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def connect(address: str, port: int, **options: Any) -> Any:
        seen.append(address)
        if ":" in address:
            await asyncio.Event().wait()
        raise OSError("nobody answers")

    resolved_to(monkeypatch, "2606:2800:21f::1", "2606:2800:21f::2", "93.184.215.14")
    monkeypatch.setattr(egress, "_CONNECT_S", 1.5)
    monkeypatch.setattr(egress, "_TRY_S", 0.01)
    async with Running("files.example:443") as (_, port):
        monkeypatch.setattr(egress.asyncio, "open_connection", open_but(connect, asyncio.open_connection))
        answer = await talk_raw(port, b"CONNECT files.example:443 HTTP/1.1\r\n\r\n")
    assert seen == ["2606:2800:21f::1", "2606:2800:21f::2", "93.184.215.14"]
    assert b"files.example:443 cannot be reached: nobody answers" in answer


async def test_names_are_resolved_in_few_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer holds up neither other names for good nor anything else in threads."""
    monkeypatch.setattr(egress, "_NAMES", egress._Names())
    release, running, most = threading.Event(), 0, 0
    asked: list[str] = []
    lock = threading.Lock()

    def slow(host: str, port: int, **options: Any) -> list[Any]:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
            asked.append(host)
        release.wait(60)
        with lock:
            running -= 1
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    names = [f"n{i}.example" for i in range(egress._NAME_THREADS + 3)]
    async with Running(*(f"{name}:443" for name in names)) as (proxy, port):
        requests = [f"CONNECT {name}:443 HTTP/1.1\r\n\r\n".encode() for name in names for _ in range(4)]
        answers = [asyncio.ensure_future(talk_raw(port, request)) for request in requests]
        async with asyncio.timeout(20):
            while len(asked) < egress._NAME_THREADS or len(proxy._tasks) < len(requests):
                await asyncio.sleep(0.01)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 5), 20) == 5
        assert most == egress._NAME_THREADS
        release.set()
        for answer in await asyncio.wait_for(asyncio.gather(*answers), 30):
            assert b"502 Bad Gateway" in answer
            assert b"no such name" in answer
        assert most == egress._NAME_THREADS
        assert sorted(asked) == sorted(names), "each once, for all connections"
        assert proxy.counts == {"egress_unreached": len(requests)}


async def test_a_connection_that_ends_while_its_name_is_resolved_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, release = egress._Names(), threading.Event()

    def slow(host: str, port: int, **options: Any) -> list[Any]:
        release.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.9", port))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    first, second = (asyncio.ensure_future(names.addresses("a.example", 443)) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.sleep(0.05)
    release.set()
    assert await asyncio.wait_for(second, 20) == ["192.0.2.9"]
    assert names._asked == {}
