"""Input that nobody can honour: one clear line before anything starts, and never the end of a sandbox."""

from __future__ import annotations

import errno
import math
import os
import resource
from dataclasses import replace
from typing import Any

import pytest
import sandbox_faults
from sandbox_backends import Opener

from swe_rl.errors import ConfigError, SandboxError
from swe_rl.sandbox.client import SandboxClient
from swe_rl.types import Limits, SandboxSpec

SPEC, LIMITS = sandbox_faults.SPEC, sandbox_faults.LIMITS

LONE = "\ud83d"  # half of a pair, as models write it; UTF-8 has no bytes for it


@pytest.mark.parametrize("cwd", ["a\0b", LONE, "x" * 9_000_000], ids=["NUL", "surrogate", "long"])
async def test_a_directory_without_a_name_is_refused(sandbox: SandboxClient, cwd: str) -> None:
    result = await sandbox.exec("true", cwd=cwd)
    assert (result.exit_code, result.outcome) == (126, "nonzero")
    assert result.stderr.startswith(b"sandbox: ")
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_a_command_that_is_no_text_is_refused(sandbox: SandboxClient) -> None:
    result = await sandbox.exec(f"echo {LONE}")
    assert (result.exit_code, result.outcome) == (126, "nonzero")
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


@pytest.mark.parametrize(
    ("path", "code"),
    [(LONE, errno.EILSEQ), ("x" * 9_000_000, errno.ENAMETOOLONG), ("a\0b", errno.EINVAL), ("", errno.EINVAL)],
    ids=["surrogate", "long", "NUL", "empty"],
)
async def test_a_path_that_cannot_be(sandbox: SandboxClient, path: str, code: int) -> None:
    for call in (sandbox.read_file(path), sandbox.write_file(path, b"x")):
        with pytest.raises(OSError, match=os.strerror(code)) as err:
            await call
        assert err.value.errno == code
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_odd_time_limits(sandbox: SandboxClient) -> None:
    assert (await sandbox.exec("echo on", timeout_s=math.inf)).stdout == b"on\n"
    assert (await sandbox.exec("sleep 9", timeout_s=-1.0)).outcome == "timeout"  # a budget that is used up
    with pytest.raises(ConfigError, match="timeout_s=nan"):
        await sandbox.exec("true", timeout_s=math.nan)


BAD_SPECS: dict[str, tuple[dict[str, Any], str]] = {
    "NUL in env": ({"env": {"A": "x\0y"}}, "env"),
    "name with =": ({"env": {"A=B": "x"}}, "env"),
    "no name": ({"env": {"": "x"}}, "env"),
    "lone surrogate in env": ({"env": {"A": LONE}}, "env"),
    "many variables": ({"env": {f"A{i}": "x" for i in range(600)}}, "env"),
    "long variable": ({"env": {"A": "x" * (200 << 10)}}, "env"),
    "all variables too long": ({"env": {f"A{i}": "x" * (100 << 10) for i in range(20)}}, "env"),
    "root twice": ({"workdir": "//"}, "workdir"),
    "ours": ({"workdir": "/.swe-rl/x"}, "workdir"),
    "kernel's": ({"workdir": "/proc/self"}, "workdir"),
    "NUL in workdir": ({"workdir": "/a\0b"}, "workdir"),
    "long workdir": ({"workdir": "/" + "x" * 300}, "workdir"),
    "surrogate in workdir": ({"workdir": "/" + LONE}, "workdir"),
    "mount at root": ({"readonly_mounts": (("/etc", "/"),)}, "readonly_mounts"),
    "mount nowhere": ({"readonly_mounts": (("/etc", "relative"),)}, "readonly_mounts"),
    "mount over ours": ({"readonly_mounts": (("/etc", "/.swe-rl/shared"),)}, "readonly_mounts"),
    "many layers": ({"layers": ("/etc",) * 70}, "layers"),
    "lease forever": ({"limits": replace(LIMITS, lease_s=math.inf)}, "lease_s"),
    "lease nan": ({"limits": replace(LIMITS, lease_s=math.nan)}, "lease_s"),
    "no lease": ({"limits": replace(LIMITS, lease_s=0.0)}, "lease_s"),
    "no disk": ({"limits": replace(LIMITS, disk_bytes=0)}, "disk_bytes"),
    "no memory": ({"limits": replace(LIMITS, memory_bytes=0)}, "memory_bytes"),
    "all memory": ({"limits": replace(LIMITS, memory_bytes=1 << 62)}, "memory_bytes"),
    "no processes": ({"limits": replace(LIMITS, pids=0)}, "pids"),
    "negative cpus": ({"limits": replace(LIMITS, cpus=-1.0)}, "cpus"),
    "no output": ({"limits": replace(LIMITS, output_bytes=0)}, "output_bytes"),
    "much output": ({"limits": replace(LIMITS, output_bytes=4 << 20)}, "output_bytes"),
}


@pytest.mark.parametrize("name", BAD_SPECS)
async def test_specs_that_nobody_can_honour(opener: Opener, name: str) -> None:
    change, what = BAD_SPECS[name]
    with pytest.raises(ConfigError, match=what) as err:
        await opener(replace(SPEC, **change))
    assert "\n" not in str(err.value)


@pytest.mark.parametrize("cpus", [1000.0, 0.001])
async def test_any_share_of_processors_is_kept_as_near_as_can_be(opener: Opener, cpus: float) -> None:
    async with await opener(SandboxSpec(limits=Limits(cpus=cpus))) as sandbox:
        assert (await sandbox.exec("echo on")).stdout == b"on\n"


async def test_fork_when_no_descriptor_is_free(sandbox: SandboxClient) -> None:
    """The answer then comes without its descriptor. Trouble of this machine; the parent lives on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    await sandbox.exec("true")
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(SandboxError, match="descriptor"):
            await sandbox.fork()  # type: ignore[attr-defined]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
    async with await sandbox.fork() as other:  # type: ignore[attr-defined]
        assert (await other.exec("cat readme")).stdout == b"hello\n"


async def test_fork_of_a_file_that_is_mostly_holes(sandbox: SandboxClient) -> None:
    """A terabyte of nothing takes no disk, and so does its copy."""
    await sandbox.exec("truncate -s 1T big; printf x | dd of=big bs=1 seek=1000000 conv=notrunc; echo end >> small")
    async with await sandbox.fork() as other:  # type: ignore[attr-defined]
        assert (await other.exec("stat -c %s big; tail -c +1000001 big | head -c 1; cat small")).stdout == (
            b"1099511627776\nxend\n"
        )
        assert int((await other.exec("du -k big")).stdout.split()[0]) < 64
