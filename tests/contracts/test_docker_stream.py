"""The stream of a container: who may speak on it, and what happens when it breaks."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import sandbox_backends
import sandbox_faults

from swe_rl.errors import SandboxLost
from swe_rl.sandbox import wire
from swe_rl.sandbox.docker import DockerSandbox, Engine
from swe_rl.sandbox.docker.door import MAX_STRANGERS, NONCE_SIZE

ROOMY = replace(sandbox_faults.SPEC, limits=replace(sandbox_faults.LIMITS, disk_bytes=128 << 20))


@pytest.fixture
async def sandbox(layer: Path) -> AsyncIterator[DockerSandbox]:
    sandbox_backends.require_mode("docker")
    async with await sandbox_backends.start("docker", replace(ROOMY, layers=(str(layer),))) as opened:
        assert isinstance(opened, DockerSandbox)
        yield opened


def cut(sandbox: DockerSandbox, *, after: bytes = b"") -> None:
    """Breaks the stream under the sandbox, after these bytes of a frame that will never be whole."""
    assert sandbox._channel is not None
    sock = sandbox._channel._sock
    if after:
        sock.send(after)
    sock.shutdown(socket.SHUT_RDWR)


async def call_as(sandbox: DockerSandbox, greeting: bytes) -> socket.socket:
    """One more connection to the sandbox's socket, as somebody who says `greeting`."""
    assert sandbox._door is not None
    caller = socket.socket(socket.AF_UNIX)
    caller.setblocking(False)
    await asyncio.get_running_loop().sock_connect(caller, str(sandbox._door.shared / "owner"))
    caller.send(greeting)
    await asyncio.sleep(0.1)
    return caller


# ---- breaking --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [b"", wire.frame(wire.EXEC, 77, bytes(100))[:30]], ids=["between frames", "mid-frame"])
async def test_a_command_runs_once_although_the_stream_breaks(sandbox: DockerSandbox, part: bytes) -> None:
    task = asyncio.create_task(sandbox.exec("echo ran >> count; sleep 0.6; cat count; echo error >&2; exit 7"))
    await asyncio.sleep(0.2)
    cut(sandbox, after=part)
    result = await task
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"ran\n", b"error\n")
    assert sandbox.reconnects == 1
    assert (await sandbox.exec("cat count")).stdout == b"ran\n"


async def test_a_result_that_was_lost_on_the_way_is_sent_again(sandbox: DockerSandbox) -> None:
    """The command ends while there is no stream."""
    task = asyncio.create_task(sandbox.exec("sleep 0.3; echo done >> count; cat count"))
    await asyncio.sleep(0.1)
    assert sandbox._door is not None
    sandbox._door._socket.listen(0)
    loop = asyncio.get_running_loop()
    loop.remove_reader(sandbox._door._socket.fileno())  # nobody opens to the supervisor for a while
    cut(sandbox)
    await asyncio.sleep(0.8)
    loop.add_reader(sandbox._door._socket.fileno(), sandbox._door._accept)
    assert (await task).stdout == b"done\n"
    assert (await sandbox.exec("cat count")).stdout == b"done\n"


async def test_transfers_survive_cuts(sandbox: DockerSandbox) -> None:
    data = os.urandom(50 << 20)
    write = asyncio.create_task(sandbox.write_file("big", data))
    await asyncio.sleep(0.02)
    cut(sandbox)
    await write
    read = asyncio.create_task(sandbox.read_file("big"))
    await asyncio.sleep(0.02)
    cut(sandbox)
    assert await read == data
    assert sandbox.reconnects == 2


async def test_many_cuts_under_many_commands(sandbox: DockerSandbox) -> None:
    async def commands(number: int) -> list[bytes]:
        return [(await sandbox.exec(f"echo {number} {i} >> log; echo {number} {i}")).stdout for i in range(20)]

    async def cuts() -> None:
        for _ in range(10):
            await asyncio.sleep(0.05)
            if sandbox._channel is not None:
                cut(sandbox)

    results, _ = await asyncio.gather(asyncio.gather(*(commands(n) for n in range(4))), cuts())
    assert results == [[b"%d %d\n" % (n, i) for i in range(20)] for n in range(4)]
    lines = (await sandbox.read_file("log")).splitlines()
    assert sorted(lines) == sorted(b"%d %d" % (n, i) for n in range(4) for i in range(20))  # none twice
    assert sandbox.reconnects >= 5


async def test_cancelling_while_the_stream_is_broken_kills_the_command(sandbox: DockerSandbox) -> None:
    task = asyncio.create_task(sandbox.exec("(setsid sleep 100 &); sleep 100"))
    await asyncio.sleep(0.3)
    cut(sandbox)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        if not await sandbox.ping():
            break
        await asyncio.sleep(0.02)
    assert await sandbox.ping() == 0


async def test_a_container_that_is_gone_is_a_lost_sandbox_at_once(sandbox: DockerSandbox) -> None:
    task = asyncio.create_task(sandbox.exec("sleep 100"))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(Engine.shared().remove, sandbox._name)
    start = time.monotonic()
    with pytest.raises(SandboxLost):
        await task
    assert time.monotonic() - start < 2
    with pytest.raises(SandboxLost):
        await sandbox.exec("true")


async def test_a_stopped_container_says_why(sandbox: DockerSandbox) -> None:
    """docker stop, and an engine that shuts down: no ten seconds until the engine kills."""
    task = asyncio.create_task(sandbox.exec("sleep 100"))
    await asyncio.sleep(0.2)
    start = time.monotonic()
    await asyncio.to_thread(Engine.shared()._api.stop, sandbox._name)
    with pytest.raises(SandboxLost, match="the container was stopped"):
        await task
    assert time.monotonic() - start < 8


async def test_fork_after_a_cut(sandbox: DockerSandbox) -> None:
    await sandbox.exec("echo changed > readme; rm -r pkg")
    cut(sandbox)
    async with await sandbox.fork() as other:
        assert (await other.exec("cat readme; ls")).stdout == b"changed\nreadme\n"


# ---- strangers -------------------------------------------------------------------------------------------------


async def test_strangers_at_the_socket_are_refused(sandbox: DockerSandbox) -> None:
    assert sandbox._door is not None
    wrong = [
        wire.frame(wire.HELLO, 0, b"0" * NONCE_SIZE + b"f" * 32),
        wire.frame(wire.READY, 0, bytes(4)),
        wire.frame(wire.HELLO, 0, b""),
        b"GET / HTTP/1.1\r\n\r\n" * 20,
    ]
    for greeting in wrong:
        with await call_as(sandbox, greeting) as caller:
            with suppress(ConnectionResetError):  # closed before all of it was read
                assert caller.recv(100) == b""  # closed, nothing said
    assert sandbox._door.refused == len(wrong)
    silent = [await call_as(sandbox, b"") for _ in range(MAX_STRANGERS + 3)]
    assert len(sandbox._door._strangers) == MAX_STRANGERS
    assert (await sandbox.exec("echo well")).stdout == b"well\n"
    assert sandbox.reconnects == 0
    for caller in silent:
        caller.close()


async def test_another_boot_id_is_a_lost_sandbox(sandbox: DockerSandbox) -> None:
    """A container that was started again has the nonce, but not the files."""
    assert sandbox._door is not None
    greeting = wire.frame(wire.HELLO, 0, sandbox._door._nonce + b"f" * 32)
    with await call_as(sandbox, greeting), pytest.raises(SandboxLost, match="started again"):
        await sandbox.exec("true")


async def test_nonce_and_socket_are_closed_to_commands(sandbox: DockerSandbox) -> None:
    assert sandbox._door is not None
    nonce = sandbox._door._nonce
    for command in ("cat /proc/1/environ", "env", "cat /proc/self/environ", "grep -ra NONCE /.swe-rl/shared /proc/1"):
        result = await sandbox.exec(command)
        assert nonce not in result.stdout + result.stderr
    code = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/.swe-rl/shared/owner'); print('connected')"
    if os.geteuid() != 1000:
        assert (await sandbox.exec(f'python3 -c "{code}"')).stdout == b""
    assert (await sandbox.exec("rm -f /.swe-rl/shared/owner || touch /.swe-rl/shared/x")).exit_code == 1
