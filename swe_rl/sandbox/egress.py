"""The one way out of a sandbox: a proxy of the owner that connects to the listed hosts and to nothing else.

A sandbox has a network namespace with loopback only, and that stays so. Where SandboxSpec.egress lists hosts, the
supervisor makes a socket that listens on that loopback and passes it to the owner: what a command connects to in there
is accepted out here, by an HTTP proxy that connects when "host:port" is listed. So nothing runs in the sandbox for it,
no interface, route or name server is added, no right is needed, and it is the same in a container. Names are resolved
out here, listed ones only, and a name may be anybody's, who may point it at services that trust whoever is here: an
address that is not public has to be listed itself. HTTP_PROXY and HTTPS_PROXY tell curl, pip, git and the like; others
have no network.

Grading never gets it (rollout/wiring.py): whether a patch works must not depend on what somebody serves today.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor

from swe_rl.egress_pair import egress_pair
from swe_rl.types import SandboxSpec

PORT = 3128  # in the sandbox, whose loopback is its own
MAX_CONNECTIONS = 64  # of a sandbox at a time; further ones wait
_HEAD_BYTES = 16 << 10
_HEAD_S, _CONNECT_S, _LINGER_S, _PAUSE_S = 30.0, 20.0, 1.0, 0.1
_TRY_S = 2.0  # for one address of several at least, of all that _CONNECT_S leaves
_HALF_S = 60.0  # silence after which the other direction of a half closed connection ends as well
_PIECE = 64 << 10
_NAME_THREADS = 4  # in which names are resolved, of all sandboxes of this process
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are the IPv4 address that is meant
_METADATA = {"168.63.129.16", "192.0.0.192"}  # of clouds, outside the ranges that are not public anyway
_HOP = (b"connection", b"proxy-connection", b"proxy-authorization", b"keep-alive", b"host")


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _RefusedError(Exception):
    """The status line and the reason that the client gets, and what it is counted as."""

    def __init__(self, status: str, why: str, *, count: str = "egress_refused") -> None:
        super().__init__(why)
        self.status, self.count = status, count


def variables(spec: SandboxSpec) -> dict[str, str]:
    """What programs in the sandbox need to find the proxy; {} where the spec lists no host."""
    if not spec.egress:
        return {}
    proxy, own = f"http://127.0.0.1:{PORT}", "localhost,127.0.0.1,::1"
    found = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "NO_PROXY": own}
    return found | {name.lower(): value for name, value in found.items()}


class EgressProxy:
    """Serves one sandbox until `close`. Belongs to the event loop that is running when it is made."""

    def __init__(self, listener: int, allowed: Sequence[str]) -> None:
        """`listener`: descriptor of a listening TCP socket, which is the proxy's from now on."""
        self._allowed = frozenset(egress_pair(entry) for entry in allowed)
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self._tasks: set[asyncio.Task[None]] = set()  # one per connection from inside
        self._writers: set[asyncio.StreamWriter] = set()  # of both sides
        self.counts: Counter[str] = Counter()  # connections: "egress_opened", "egress_refused", "egress_unreached"
        self._listen()

    def close(self) -> None:
        """Ends the listening and every connection. Idempotent."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()  # held open, it would keep the network namespace
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it hung up already, or no descriptor is free
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(_PAUSE_S, self._listen)
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._serve_one(connection), name="egress")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if len(self._tasks) >= MAX_CONNECTIONS:
            self._loop.remove_reader(self._listener.fileno())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._listen()

    async def _serve_one(self, connection: socket.socket) -> None:
        """One connection from inside. Whatever is wrong with it ends it, and nothing else."""
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=_HEAD_BYTES)
        except BaseException:
            connection.close()
            raise
        self._writers.add(writer)
        try:
            await self._pass_on(reader, writer)
        except _RefusedError as err:
            self.counts[err.count] += 1
            await _refuse(reader, writer, err)
        except (OSError, ExceptionGroup, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # one of the two sides went away, or sent no request
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
        pair, first = _parse(head)
        if pair not in self._allowed:
            raise _RefusedError("403 Forbidden", f"{pair[0]}:{pair[1]} is not among the allowed hosts")
        there, up = await _connect(*pair, self._allowed)
        self._writers.add(up)
        try:
            self.counts["egress_opened"] += 1
            if first:
                up.write(first)
            else:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            limits: list[asyncio.Timeout] = []
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, up, limits))
                group.create_task(_pump(there, writer, limits))
        finally:
            self._writers.discard(up)
            up.close()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, err: _RefusedError) -> None:
    """Says why; what the client still sends is read, or the kernel would take the answer back."""
    body = f"sandbox: {err}\n".encode()
    writer.write(f"HTTP/1.1 {err.status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    with contextlib.suppress(OSError):  # TimeoutError is one
        writer.write_eof()
        async with asyncio.timeout(_LINGER_S):
            while await reader.read(_PIECE):
                pass


def _parse(head: bytes) -> tuple[tuple[str, int], bytes]:
    """((host, port), what is sent there first): b"" for CONNECT, else the request in the form that servers take."""
    line, *fields = head[:-4].split(b"\r\n")
    words = line.split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        raise _RefusedError("400 Bad Request", "this is an HTTP proxy")
    method, target, version = words
    if method == b"CONNECT":
        return _pair(target, ""), b""
    scheme, _, rest = target.partition(b"://")
    if scheme.lower() != b"http":
        raise _RefusedError("400 Bad Request", "only http:// requests and CONNECT are passed on")
    authority, slash, path = rest.partition(b"/")
    kept = [field for field in fields if field.partition(b":")[0].strip().lower() not in _HOP]
    lines = [b" ".join((method, slash + path or b"/", version)), b"Host: " + authority, b"Connection: close", *kept]
    return _pair(authority, ":80"), b"\r\n".join(lines) + b"\r\n\r\n"


def _pair(authority: bytes, default: str) -> tuple[str, int]:
    text = authority.decode("latin-1")
    has_port = text.rpartition(":")[2].isdigit() and not text.endswith("]")
    try:
        return egress_pair(text if has_port else text + default)
    except ValueError as err:
        raise _RefusedError("400 Bad Request", f"{text[:100]!r} is no host and port") from err


class _Names:
    """Resolves in a few threads of its own: a name server that is slow holds up nothing else that runs in threads. A
    name is asked for once at a time, however many connections want it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NAME_THREADS, thread_name_prefix="egress-names")
        self._asked: dict[tuple[str, int], Future[list[str]]] = {}

    async def addresses(self, host: str, port: int) -> list[str]:
        """Addresses of `host`, each once. Raises OSError, UnicodeError for what can be no name."""
        asked = self._asked.get((host, port))
        if asked is None:
            asked = self._asked[host, port] = self._pool.submit(_resolve, host, port)
            asked.add_done_callback(lambda _: self._asked.pop((host, port), None))
        return await asyncio.shield(asyncio.wrap_future(asked))  # others may wait for it as well


_NAMES = _Names()


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(item[4][0]) for item in found))


async def _connect(
    host: str, port: int, allowed: Set[tuple[str, int]]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To the first address of the host that answers and is public or in `allowed` itself. One that is silent leaves
    time for the others: names have addresses of IPv6 where packets to those get lost."""
    now = asyncio.get_running_loop().time
    end = now() + _CONNECT_S
    try:
        async with asyncio.timeout_at(end):
            addresses = [host] if _is_address(host) else await _NAMES.addresses(host, port)
            usable = [address for address in addresses if _may_be_used(address, port, allowed)]
            if addresses and not usable:
                raise _RefusedError("403 Forbidden", f"{host} has no public address: list the address that is meant")
            last: Exception = OSError("it has no address")
            for number, address in enumerate(usable):
                try:
                    async with asyncio.timeout(max(_TRY_S, (end - now()) / (len(usable) - number))):
                        return await asyncio.open_connection(address, port, limit=_PIECE)
                except OSError as err:
                    last = err
            raise last
    except (OSError, UnicodeError) as err:  # TimeoutError is an OSError
        why = f"{host}:{port} cannot be reached: {err or 'no answer'}"
        raise _RefusedError("502 Bad Gateway", why, count="egress_unreached") from err


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _may_be_used(address: str, port: int, allowed: Set[tuple[str, int]]) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    if (str(found), port) in allowed:
        return True
    return all(map(_is_public, _meant(found))) and not _is_own(address)


def _meant(address: _Address) -> Iterator[_Address]:
    """The address that packets to `address` get to: IPv6 has several ways to write one of IPv4."""
    if not isinstance(address, ipaddress.IPv6Address):
        yield address
    elif address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    elif address in _NAT64:
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    else:
        yield address
        yield from filter(None, (address.sixtofour, *(address.teredo or ())))


def _is_public(address: _Address) -> bool:
    """Whether it is of the internet: no private network, no loopback or link, no cloud's service for its machines."""
    special = address.is_multicast or address.is_reserved or address.is_unspecified or str(address) in _METADATA
    return address.is_global and not special and not getattr(address, "is_site_local", False)


def _is_own(address: str) -> bool:
    """Whether an interface of this machine has it: a service that listens on all addresses listens there, too."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: list[asyncio.Timeout]) -> None:
    """Until the end of one direction. The other may go on, but not in silence: a program that was killed in the sandbox
    looks like one that only has no more to say, and its place would be taken for good. `limits`: of directions that are
    open, for whichever ends first."""
    now = asyncio.get_running_loop().time
    async with asyncio.timeout(None) as limit:
        limits.append(limit)
        await asyncio.sleep(0)  # both are there before one can end
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()
            if limit.when() is not None and not limit.expired():
                limit.reschedule(now() + _HALF_S)
    limits.remove(limit)
    for other in limits:
        other.reschedule(now() + _HALF_S)
    if writer.can_write_eof():
        writer.write_eof()
