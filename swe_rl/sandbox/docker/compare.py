"""The same steps by our backends and by what others use, interleaved in one run: start, a command, close.

Others: the docker command, the Docker SDK (one `exec_run` per command, as many scaffolds do) and, when installed, the
local runtime of SWE-ReX (a bash session behind pexpect). Interleaving lets a busy machine slow all of them alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from swe_rl.errors import ImageError, SandboxError
from swe_rl.sandbox import open_sandbox
from swe_rl.sandbox.docker.engine import Engine
from swe_rl.sandbox.oci import default_store
from swe_rl.types import SandboxSpec

STEPS = ("start", "command", "close")
_COMMAND = "true"
_IDLE = ("sleep", "600")


class System(Protocol):
    """One way to have a sandbox."""

    async def start(self) -> None: ...
    async def command(self) -> None: ...
    async def close(self) -> None: ...


class Ours:
    """A backend of this package."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        self._sandbox = await self._stack.enter_async_context(open_sandbox(self._spec))

    async def command(self) -> None:
        if (await self._sandbox.exec(_COMMAND)).exit_code:
            raise SandboxError(f"{_COMMAND} failed")

    async def close(self) -> None:
        await self._stack.aclose()


class DockerCommand:
    """docker run -d, docker exec, docker rm -f."""

    def __init__(self, image: str) -> None:
        self._image = image

    async def _run(self, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec("docker", *arguments, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        if process.returncode:
            raise SandboxError(f"docker {arguments[0]} failed with exit code {process.returncode}")
        return output.decode().strip()

    async def start(self) -> None:
        self._id = await self._run("run", "-d", "--network", "none", self._image, *_IDLE)

    async def command(self) -> None:
        await self._run("exec", self._id, "bash", "-c", _COMMAND)

    async def close(self) -> None:
        await self._run("rm", "-f", self._id)


class DockerSdk:
    """containers.run, exec_run, remove."""

    def __init__(self, image: str) -> None:
        import docker

        self._image = image
        self._client = docker.DockerClient(base_url=Engine.shared().host)

    async def start(self) -> None:
        run = self._client.containers.run
        self._container = await asyncio.to_thread(
            lambda: run(self._image, list(_IDLE), detach=True, network_mode="none")
        )

    async def command(self) -> None:
        result = await asyncio.to_thread(self._container.exec_run, ["bash", "-c", _COMMAND])
        if result.exit_code:
            raise SandboxError(f"exec_run ended with {result.exit_code}")

    async def close(self) -> None:
        await asyncio.to_thread(lambda: self._container.remove(force=True))


class SweRex:
    """A bash session of SWE-ReX's local runtime: no container at all, so its cost alone."""

    async def start(self) -> None:
        from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
        from swerex.runtime.local import LocalRuntime

        self._action = BashAction(command=_COMMAND)
        self._runtime = LocalRuntime()
        await self._runtime.create_session(CreateBashSessionRequest())

    async def command(self) -> None:
        await self._runtime.run_in_session(self._action)

    async def close(self) -> None:
        await self._runtime.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Milliseconds of one step of one system."""

    system: str
    step: str
    num: int
    p50_ms: float
    p95_ms: float
    times_ours: float  # its p50 by that of our Docker backend


def systems(image: str) -> dict[str, Callable[[], System]]:
    """Those that this machine has, ours first; local sandboxes of the image if it was imported."""
    found: dict[str, Callable[[], System]] = {
        "swe_rl docker": lambda: Ours(SandboxSpec(backend="docker", image=image)),
        "swe_rl local": lambda: Ours(SandboxSpec()),
    }
    with contextlib.suppress(ImageError):
        default_store().find(image)
        found["swe_rl image"] = lambda: Ours(SandboxSpec(image=image))  # without the engine
    if shutil.which("docker"):
        found["docker command"] = lambda: DockerCommand(image)
    found["docker SDK"] = lambda: DockerSdk(image)
    if importlib.util.find_spec("swerex") is not None:
        found["SWE-ReX local"] = SweRex
    return found


async def compare(image: str, *, num: int, commands: int) -> list[Row]:
    """Opens `num` sandboxes of each system one after another and runs `commands` commands in each, in turns.

    Raises SandboxError when a system fails.
    """
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    made = systems(image)
    for repeat in range(num + 1):  # the first round warms caches and is dropped
        opened: dict[str, System] = {}
        async with contextlib.AsyncExitStack() as stack:
            for name, make in made.items():
                system = opened[name] = make()
                times[name, "start"].append(await _timed(system.start))
                stack.push_async_callback(_close, system, times[name, "close"])
            for _ in range(commands):
                for name, system in opened.items():
                    times[name, "command"].append(await _timed(system.command))
        if repeat == 0:
            times.clear()
    return [_row(name, step, times) for step in STEPS for name in made]


async def _timed(step: Callable[[], Awaitable[Any]]) -> float:
    before = time.perf_counter()
    await step()
    return (time.perf_counter() - before) * 1e3


async def _close(system: System, into: list[float]) -> None:
    into.append(await _timed(system.close))


def _row(name: str, step: str, times: dict[tuple[str, str], list[float]]) -> Row:
    values = sorted(times[name, step])
    p50 = statistics.median(values)
    ours = statistics.median(times["swe_rl docker", step])
    p95 = values[min(int(len(values) * 0.95), len(values) - 1)]
    return Row(system=name, step=step, num=len(values), p50_ms=p50, p95_ms=p95, times_ours=p50 / ours)
