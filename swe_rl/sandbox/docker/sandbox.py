"""One sandbox in a container: made through the engine, then served by its supervisor past the engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import select
import socket
import time

from swe_rl.errors import SandboxError, SandboxLost
from swe_rl.sandbox import wire
from swe_rl.sandbox.binary import sandboxd_path
from swe_rl.sandbox.channel import Channel
from swe_rl.sandbox.client import SandboxClient
from swe_rl.sandbox.docker.container import (
    check_docker_spec,
    container_config,
    setup_body,
    with_workdir,
    write_accounts,
)
from swe_rl.sandbox.docker.door import NONCE_SIZE, Door
from swe_rl.sandbox.docker.engine import Engine, Image
from swe_rl.sandbox.owner import owner_label
from swe_rl.types import SandboxSpec

READY_S = 60.0  # from the engine's answer until the supervisor is ready: a busy machine, a large tree
RETURN_S = 30.0  # how long a supervisor whose process we see alive may take to open a broken stream again
_LOOK_S = 0.02
_ALIVE_S = 3.0  # between two questions whether the container runs
_numbers = itertools.count()


class DockerSandbox(SandboxClient):
    """Implements protocols.Sandbox. Make one with `open_sandbox` or `SandboxPool.lease`.

    Commands run as uid 1000 without any capability. `workdir` is a size-capped memory file system with the layers
    copied in, or, when the image brings that directory and there are no layers, the image's own, given to uid 1000.
    """

    ready_s = READY_S

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._name = f"swe-rl-{owner_label()}-{next(_numbers)}-{secrets.token_hex(4)}"
        self._door: Door | None = None
        self._entered: asyncio.Future[None] | None = None
        self._boot_id = ""
        self._supervisor = -1  # descriptor of its process, -1 when we cannot see it
        self._starting: asyncio.Future[Image] | None = None  # the engine's calls, which cannot be cancelled
        self._return: asyncio.Task[None] | None = None
        self._received: list[int] = []  # results to acknowledge with the next request
        self._unsent: list[bytes] = []  # while the stream is broken: what is no request
        self.reconnects = 0

    # ---- life -----------------------------------------------------------------------------------------------

    def _check_spec(self) -> None:
        check_docker_spec(self.spec)

    async def _start(self, copy_from: int | None) -> None:
        nonce = secrets.token_hex(NONCE_SIZE // 2)
        self._entered = asyncio.get_running_loop().create_future()
        self._door = Door(nonce, on_enter=self._on_enter)
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._create, nonce))
        image = await asyncio.shield(self._starting)
        await self._await_call()
        body = setup_body(self.spec, image)
        ready = self._expect(0)
        try:
            if self._channel is None:
                raise SandboxLost(self._ended or "the stream broke at once")
            self._channel.send_with(wire.frame(wire.SETUP, 0, body), [] if copy_from is None else [copy_from])
            frame = await asyncio.wait_for(ready.reply, READY_S)
        finally:
            self._requests.pop(0, None)
        if frame.kind == wire.FAILED:
            raise SandboxError(f"the sandbox could not be made: {frame.body[4:].decode(errors='replace')}")

    async def _await_call(self) -> None:
        """Until the supervisor has called. One that ended before it could is noticed soon."""
        assert self._entered is not None
        for _ in range(int(READY_S / _ALIVE_S)):
            await asyncio.wait([self._entered], timeout=_ALIVE_S)
            if self._entered.done():
                return self._entered.result()
            if not await asyncio.to_thread(Engine.shared().is_running, self._name) and not self._entered.done():
                raise SandboxError("the container ended before its supervisor called")
        raise TimeoutError

    def _create(self, nonce: str) -> Image:
        """In a thread: the engine's part."""
        assert self._door is not None
        engine = Engine.shared()
        image = engine.image(self.spec.image, workdir=os.path.normpath(self.spec.workdir))
        self.spec = with_workdir(self.spec, image)
        write_accounts(image, self._door.directory)
        config = container_config(
            self.spec,
            image,
            nonce=nonce,
            directory=self._door.directory,
            shared=self._door.shared,
            program=sandboxd_path(),
            auto_remove=engine.removes_ended,
            abilities=engine.abilities(image.id),
        )
        engine.start(self._name, config)
        return image

    async def close(self) -> None:
        """Ends the sandbox and waits until its container is gone. Idempotent.

        An engine that does not answer is not waited for beyond its time: the supervisor ends by itself, since nobody
        listens for it any more, and the engine removes the container when it is back.
        """
        self._abandon("the sandbox is closed")
        if self._return is not None:
            self._return.cancel()
        if self._door is not None:
            self._door.close()
        if self._supervisor >= 0:
            os.close(self._supervisor)
            self._supervisor = -1
        if self._starting is None:
            return
        await asyncio.wait([self._starting])
        self._starting.exception()  # seen by whoever started it; perhaps there is a container all the same
        with contextlib.suppress(SandboxError):
            await asyncio.to_thread(lambda: Engine.shared().remove(self._name))
        self._starting = None  # last: a close that was cancelled can be repeated

    async def fork(self) -> DockerSandbox:
        """A new sandbox of the same spec with a copy of the work directory, made by the new supervisor.

        Processes, /tmp, /home and shared memory are not copied. The lease starts anew.
        """
        workdir = await self._snapshot()
        try:
            return await DockerSandbox(self.spec).start(copy_from=workdir)
        finally:
            os.close(workdir)

    # ---- the stream -----------------------------------------------------------------------------------------

    def _on_enter(self, connection: socket.socket, boot_id: str, pid: int) -> None:
        """A supervisor has shown the nonce: for the first time, or after its stream broke."""
        if self._ended:
            connection.close()
        elif not self._boot_id:
            self._boot_id, self._supervisor = boot_id, _open_process(pid)
            self._use(connection)
            assert self._entered is not None
            if not self._entered.done():
                self._entered.set_result(None)
        elif boot_id != self._boot_id:
            connection.close()
            self._abandon("the container was started again: its files and processes are gone")
        else:
            self.reconnects += 1
            self._use(connection)
            self._send_again()

    def _use(self, connection: socket.socket) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = Channel(connection, on_frame=self._on_frame, on_end=self._on_break)

    def _send_again(self) -> None:
        """All without an answer: what the supervisor has begun or done, it does not do a second time."""
        assert self._channel is not None
        for request in self._requests.values():
            request.chunks.clear()
            for piece in request.frames:
                self._channel.send(piece)
        for note in self._unsent:
            self._channel.send(note)
        self._unsent.clear()

    def _send(self, data: bytes) -> None:
        if self._ended:
            raise SandboxLost(self._ended)
        if self._channel is None:  # broken just now; requests are sent again by themselves
            return
        received, self._received = self._received, []
        self._channel.send(b"".join([*(wire.frame(wire.ACK, number) for number in received), data]))

    def _send_note(self, data: bytes) -> None:
        if self._channel is None:
            self._unsent.append(data)
        else:
            self._send(data)

    def _on_frame(self, frame: wire.Frame) -> None:
        if frame.kind == wire.RESULT:
            self._received.append(frame.request_id)
        super()._on_frame(frame)

    def _on_break(self, reason: str) -> None:
        self._channel = None
        if self._ended or 0 in self._requests:  # while it is set up: nothing to come back to
            self._abandon(reason)
        elif self._return is None or self._return.done():
            self._return = asyncio.ensure_future(self._await_return(reason))

    async def _await_return(self, reason: str) -> None:
        """Gives the sandbox up when its supervisor has ended, or does not open the stream again in time."""
        deadline = time.monotonic() + RETURN_S
        while self._channel is None and not self._ended:
            await asyncio.sleep(_LOOK_S)
            gone = _has_ended(self._supervisor)
            if self._channel is None and (gone or time.monotonic() > deadline):
                self._from_inside = gone and not self._ended
                self._abandon(reason if gone else "the supervisor did not open its broken stream again")

    def _abandon(self, reason: str) -> None:
        self._ended = self._ended or reason
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if self._entered is not None and not self._entered.done():
            self._entered.set_exception(SandboxLost(self._ended))
            self._entered.exception()  # nobody may be waiting for it
        self._fail_requests()


def _open_process(pid: int) -> int:
    """-1 for a process that ended already or lives in a namespace that we do not see."""
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1


def _has_ended(process: int) -> bool:
    if process < 0:
        return False  # nobody knows
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))
