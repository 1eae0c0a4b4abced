"""The proxy that allowed hosts are reached by: what it takes for a host, which addresses it will not touch."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

import pytest

from swe_rl.cli.hydra_entry import compose_config
from swe_rl.config import SandboxConfig, TrainConfig, validate
from swe_rl.config.sandbox import validate_sandbox
from swe_rl.egress_pair import egress_pair
from swe_rl.errors import ConfigError
from swe_rl.metric_table import metric_of
from swe_rl.rollout.wiring import GradingLane
from swe_rl.sandbox import SandboxPool, egress, open_sandbox
from swe_rl.sandbox.client import SandboxClient
from swe_rl.sandbox.egress import EgressProxy
from swe_rl.sandbox.stats import sandbox_metrics
from swe_rl.types import SandboxSpec


@pytest.mark.parametrize(
    ("entry", "pair"),
    [
        ("files.Example.org:443", ("files.example.org", 443)),
        ("files.example.org.:80", ("files.example.org", 80)),
        ("10.0.0.7:8080", ("10.0.0.7", 8080)),
        ("[2001:DB8::1]:443", ("2001:db8::1", 443)),
    ],
)
def test_hosts_and_ports(entry: str, pair: tuple[str, int]) -> None:
    assert egress_pair(entry) == pair


@pytest.mark.parametrize(
    "entry",
    [
        *("", "host", "host:", "host:0", "host:65536", "host:x", ":443", "*.example.org:443", "a b:1", "http://a:80"),
        *("a..b:1", "a/b:1", "user@host:1", "[::1:443", "[zz]:1", "host:٤٤٣", "-a:1", "a" * 300 + ":1", "localhost:80"),
    ],
)
def test_what_is_no_host_and_port_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.egress: "):
        egress_pair(entry)


def test_settings() -> None:
    cfg = compose_config(TrainConfig, "train", ["experiment=smoke", "sandbox.egress=['files.example.org:443']"])
    validate(cfg)
    assert list(cfg.sandbox.egress) == ["files.example.org:443"]
    for wrong in ({"isolation": "none"}, {"backend": "kubernetes"}, {"egress": ["files.example.org"]}):
        with pytest.raises(ConfigError, match=r"sandbox\.egress"):
            validate_sandbox(SandboxConfig(**{"egress": ["a:1"], **wrong}))  # type: ignore[arg-type]


async def test_a_sandbox_without_a_network_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs namespaces"):
        async with open_sandbox(SandboxSpec(isolation="none", egress=("a:1",))):
            pass
    with pytest.raises(ConfigError, match="must be host:port"):
        async with open_sandbox(SandboxSpec(egress=("a",))):
            pass


def test_grading_has_no_network() -> None:
    class Pool:
        def lease(self, spec: SandboxSpec, *, lane: str) -> SandboxSpec:
            return spec

    assert GradingLane(Pool()).lease(SandboxSpec(egress=("a:1",))).egress == ()  # type: ignore[arg-type, attr-defined]


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


async def test_only_listed_names_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question about a name leaves the machine as well."""
    asked: list[str] = []

    async def connect(host: str, port: int, allowed: Any) -> Any:
        asked.append(host)
        raise egress._RefusedError("502 Bad Gateway", "nothing here")

    monkeypatch.setattr(egress, "_connect", connect)
    async with Running("allowed.example:443") as (proxy, port):
        others = ("secret.evil.example:443", "allowed.example:80", "allowed.example.evil:443")
        for target in (*others, "ALLOWED.example.:443"):
            await talk(port, f"CONNECT {target} HTTP/1.1\r\n\r\n".encode())
        assert asked == ["allowed.example"]
        for request in (b"GET http://user@allowed.example:443/ HTTP/1.1", b"GET https://allowed.example:443/ HTTP/1.1"):
            assert b"400 Bad Request" in await talk(port, request + b"\r\n\r\n")
        assert b"400 Bad Request" in await talk(port, b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert await talk(port, b"x" * 40_000) == b""  # no end of a head
        assert proxy.counts == {"egress_refused": 7}
        assert asked == ["allowed.example"]


async def test_connections_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "MAX_CONNECTIONS", 2)
    async with Running("a.example:1") as (proxy, port):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        while len(proxy._tasks) < 2:
            await asyncio.sleep(0.01)
        third = asyncio.ensure_future(talk(port, b"CONNECT a.example:2 HTTP/1.1\r\n\r\n"))
        await asyncio.sleep(0.1)
        assert not third.done()
        assert len(proxy._tasks) == 2
        held[0][1].close()
        assert b"403 Forbidden" in await third
        held[1][1].close()


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_client_that_is_gone_holds_no_place_for_good(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end looks like that of somebody who waits for more, and this server does not hang up."""
    monkeypatch.setattr(egress, "_HALF_S", 1.0)
    slow: list[asyncio.StreamWriter] = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        slow.append(writer)
        await reader.read()  # to the end that the client makes
        writer.write(b"xxxx")

    site = await asyncio.start_server(server, "127.0.0.1", 0)
    place = f"127.0.0.1:{site.sockets[0].getsockname()[1]}"
    async with Running(place) as (proxy, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"CONNECT {place} HTTP/1.1\r\n\r\n".encode())
        if at_once:
            writer.write_eof()
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 Connection established\r\n\r\n"
        if not at_once:
            writer.write_eof()
        assert await asyncio.wait_for(reader.readexactly(4), 10) == b"xxxx"
        writer.close()
        async with asyncio.timeout(10):
            while proxy._tasks or proxy._writers:
                await asyncio.sleep(0.02)
    for each in slow:
        each.close()
    site.close()


async def test_counts_of_a_sandbox_are_metrics_of_its_pool() -> None:
    """Through a pool, whatever the sandbox is: they are added when it has ended."""

    class Client(SandboxClient):
        def _check_spec(self) -> None: ...
        def _send(self, data: bytes) -> None: ...
        def _abandon(self, reason: str) -> None: ...
        async def _start(self, copy_from: int | None) -> None: ...
        async def close(self) -> None:
            self._fail_requests()

    async def start(spec: SandboxSpec) -> Any:
        client = Client(spec)
        if spec.egress:
            client._egress = EgressProxy(socket.create_server(("127.0.0.1", 0)).detach(), spec.egress)
        return client

    pool = SandboxPool(2, start=start)
    for spec in (SandboxSpec(), SandboxSpec(egress=("a.example:443",))):
        async with pool.lease(spec) as leased:
            proxy = leased.inner._egress  # type: ignore[attr-defined]
            for target in ("b.example:443", "a.example:80") if proxy else ():
                await talk(proxy._listener.getsockname()[1], f"CONNECT {target} HTTP/1.1\r\n\r\n".encode())
    found = sandbox_metrics(pool.snapshot())
    assert found["sandbox/egress_refused"] == 2
    assert "sandbox/egress_opened" not in found
    for name in ("opened", "refused", "unreached"):
        metric = metric_of(f"sandbox/egress_{name}")
        assert metric is not None
        assert (metric.unit, metric.reduction) == ("connections", "sum")
