"""The proxy that allowed hosts are reached by: what it takes for a host, whom it serves, what it counts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
from egress_running import Running, talk

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
