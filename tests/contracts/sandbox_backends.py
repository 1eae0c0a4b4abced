"""The ways to make a sandbox, all of which hold the same contract, as far as this machine has them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

from real_parts import require

from swe_rl.errors import SandboxUnavailable
from swe_rl.sandbox import open_sandbox, wire
from swe_rl.sandbox.client import SandboxClient
from swe_rl.sandbox.docker import DockerSandbox, Engine
from swe_rl.sandbox.local import LocalSandbox
from swe_rl.types import SandboxSpec

LOCAL_MODES: dict[str, dict[str, Any]] = {
    "local": {},  # root: real mounts and id-mapped layers; a user: user namespace
    "no cgroup": {"use_cgroup": False},
    "container root": {"flags": wire.FLAG_USERNS, "use_cgroup": False},  # what root without CAP_SYS_ADMIN gets
    "no id map": {"flags": wire.FLAG_NO_IDMAP},
}
MODES = [*LOCAL_MODES, "docker"]
IMAGE = os.environ.get("SWE_RL_BASE_IMAGE", "swe-rl-base")  # made by .ci/docker-engine


@cache
def _local_trouble() -> str:
    async def attempt() -> None:
        async with open_sandbox(SandboxSpec()):
            pass

    with ThreadPoolExecutor(1) as thread:  # a fixture of a test may run in a loop already
        err = thread.submit(asyncio.run, attempt()).exception()
    if err is not None and not isinstance(err, SandboxUnavailable):
        raise err
    return str(err or "")


@cache
def _docker_trouble() -> str:
    try:
        Engine.shared().image(IMAGE, workdir="/testbed")
    except SandboxUnavailable as err:
        return str(err)
    return ""


def require_mode(mode: str) -> None:
    """Skips the test, or fails it in CI, where this machine has no such sandboxes."""
    trouble = _docker_trouble() if mode == "docker" else _local_trouble()
    what = "a Docker Engine with the base image" if mode == "docker" else "a machine that allows sandboxes"
    require(not trouble, f"{what} ({trouble})")


def make(mode: str, spec: SandboxSpec) -> SandboxClient:
    """Not started."""
    if mode == "docker":
        return DockerSandbox(replace(spec, backend="docker", image=spec.image or IMAGE))
    return LocalSandbox(spec, **LOCAL_MODES[mode])


Opener = Callable[[SandboxSpec], Any]


async def start(mode: str, spec: SandboxSpec) -> SandboxClient:
    """Ready; the caller closes it."""
    return await make(mode, spec).start()  # type: ignore[attr-defined]
