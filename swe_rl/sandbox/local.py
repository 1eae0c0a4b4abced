"""The local sandbox: namespaces and an overlay made by a static launcher, one supervisor as PID 1, one socketpair.

Inside, commands run as uid 1000, or the user of the image, with no capability, no_new_privs, a system call filter, no
network but loopback, and see only what base_root.py lists or the image holds, the overlay at `workdir`, /tmp,
/home/agent and /dev/shm. What they write is held in one tmpfs of Limits.disk_bytes. Outside they are an unprivileged id
(65521 when the owner is root, else the owner's). Nothing is written to the host's file system, and everything ends with
the supervisor: when this object is closed, the owner dies (even by SIGKILL), or the lease is over.

Threat model: whoever writes the commands, or the image, wants out, wants the answers, or wants the neighbours' share.
What stands in the way, each with the test of that name in tests/unit/sandbox/test_limits_threats.py:

    reads files of the host         no path of it but base_root.py's, read-only, or none with an image  [host_files]
    reads the owner's secrets       the environment is made from nothing                                [secrets]
    gains rights by set-id files    nosuid, no_new_privs, an empty bounding set                         [set_id]
    acts as root                    no capability; an unprivileged id outside, whatever it is inside    [root]
    changes or asks the kernel      a filter of system calls, /proc/sys read-only, no /sys              [kernel]
    nests namespaces                none may be made: user.max_user_namespaces = 0, the filter          [nesting]
    makes or opens devices          no mknod; six harmless ones in /dev                                 [devices]
    sends data out                  a network namespace with loopback only, abstract sockets included   [network]
    reaches more than listed hosts  a proxy of the owner resolves and opens what is listed, no more     [egress]
    sees or signals neighbours      PID, IPC and UTS namespaces of its own                              [neighbours]
    ends or reads the supervisor    PID 1 takes no signal from inside and is closed to ptrace and /proc [supervisor]
    speaks in the supervisor's name no descriptor of it is inherited                                    [descriptors]
    hides processes from a limit    they carry a mark that they cannot change                           [hiding]
    fills memory, disk, tables      every limit has its outcome, the next command works again           [exhaustion]
    takes more cores than its share libraries are told of one core                                      [threads]
    waits until it is forgotten     a lease, kept by the launcher outside as well                       [lease]
    leaves something to the next    a sandbox is used once, its mounts end with it                      [leftovers]
    reaches out while it is started links of an image are followed within it only                       [image_links]

Not kept: a fault of the kernel that is reachable by allowed calls, side channels of caches and time, what a host that
is listed in SandboxSpec.egress does with what it is told, and an even share of the processor beyond what the scheduler
gives. For those run the whole node in a virtual machine, or use containers
with gVisor. What this machine cannot enforce exactly is named once and shown by `swe-rl doctor` (enforcement.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket

from swe_rl.errors import SandboxLost
from swe_rl.sandbox import wire
from swe_rl.sandbox.base_root import setup_body
from swe_rl.sandbox.cgroup import new_group, remove_when_empty
from swe_rl.sandbox.channel import STREAM_ENDED, Channel
from swe_rl.sandbox.client import SandboxClient
from swe_rl.sandbox.launch import failure_of, prepared, spawn
from swe_rl.types import SandboxSpec

READY_S = 20.0  # a loaded machine may need long; a healthy one needs milliseconds
CLOSE_S = 5.0


class LocalSandbox(SandboxClient):
    """Implements protocols.Sandbox. Make one with `open_sandbox` or `SandboxPool.lease`."""

    ready_s = READY_S

    def __init__(self, spec: SandboxSpec, *, flags: int = 0, use_cgroup: bool = True) -> None:
        super().__init__(spec)
        self._flags = flags  # wire.FLAG_*: force a fallback
        self._use_cgroup = use_cgroup
        self._launcher = 0  # pid
        self._launcher_gone: asyncio.Future[None] | None = None

    def _check_spec(self) -> None:
        self.spec = prepared(self.spec)  # an image may say where its work directory is

    async def _start(self, copy_from: int | None) -> None:
        cgroup = new_group() if self._use_cgroup else None
        body = setup_body(self.spec, cgroup=cgroup, flags=self._flags)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._launcher = spawn(theirs)
            self._watch_launcher(cgroup[0] if cgroup else None)
            self._channel = Channel(ours, on_frame=self._on_frame, on_end=self._abandon)
        except BaseException:
            ours.close()
            raise
        ready = self._expect(0)
        try:
            fds = [] if copy_from is None else [copy_from]
            head, rest = (data := wire.frame(wire.SETUP, 0, body))[:12], data[12:]
            socket.send_fds(ours, [head], fds)
            self._channel.send(rest)
            frame = await asyncio.wait_for(ready.reply, READY_S)
        finally:
            self._requests.pop(0, None)
        if frame.kind == wire.FAILED:
            raise failure_of(frame.body)

    async def close(self) -> None:
        """Ends the sandbox and waits until its processes and mounts are gone. Idempotent."""
        self._ended = self._ended or "the sandbox is closed"
        if self._channel is not None:
            self._channel.close()
        self._fail_requests()
        if self._launcher_gone is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._launcher_gone), CLOSE_S)
        except TimeoutError:
            if self._launcher:
                os.kill(self._launcher, signal.SIGKILL)  # PID 1 dies with it by its parent death signal
            await self._launcher_gone

    async def fork(self) -> LocalSandbox:
        """A new sandbox of the same spec with a copy of everything written under `workdir`.

        Processes, /tmp, /home and shared memory are not copied, and hard links become files of their own. The lease
        starts anew. Raises SandboxError where the copy does not fit.
        """
        upper = await self._snapshot()
        try:
            return await LocalSandbox(self.spec, flags=self._flags, use_cgroup=self._use_cgroup).start(copy_from=upper)
        finally:
            os.close(upper)

    def _send(self, data: bytes) -> None:
        if self._channel is None:
            raise SandboxLost("the sandbox was not started")
        self._channel.send(data)

    def _abandon(self, reason: str) -> None:
        self._from_inside = not self._ended and reason == STREAM_ENDED  # PID 1 is gone and said nothing
        self._ended = self._ended or reason
        if self._channel is not None:
            self._channel.close()
        self._fail_requests()

    def _watch_launcher(self, cgroup: str | None) -> None:
        """Reaps the launcher when it exits; asyncio's own child watcher would cost a thread per sandbox."""
        loop = asyncio.get_running_loop()
        try:
            pid_fd = os.pidfd_open(self._launcher)
        except OSError:
            os.kill(self._launcher, signal.SIGKILL)  # it has started nothing yet
            os.waitpid(self._launcher, 0)
            raise
        gone = self._launcher_gone = loop.create_future()

        def exited() -> None:
            loop.remove_reader(pid_fd)
            os.close(pid_fd)
            try:
                os.waitpid(self._launcher, 0)
            except ChildProcessError:
                pass  # somebody in this process waits for all children
            self._launcher = 0
            if cgroup:
                remove_when_empty(cgroup)
            if not gone.done():
                gone.set_result(None)

        loop.add_reader(pid_fd, exited)
