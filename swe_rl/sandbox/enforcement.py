"""How each limit of a local sandbox is kept on this machine, and what cannot be kept exactly.

cpu         a quota in a cpu cgroup (version 2 or 1) where Limits.cpus is set; else the scheduler decides
memory      a memory cgroup (version 2 or 1), swap included; else the supervisor's look at proportional set sizes
            every 15 ms, which a burst can overrun for that long and pages of no process escape
processes   RLIMIT_NPROC in the sandbox's own user namespace, and the supervisor's count, threads included
disk        one tmpfs with a size and a number of files
open files  RLIMIT_NOFILE
time        the supervisor's clock for commands and the lease; the launcher's, outside, five seconds later
threads     variables that libraries ask for the number of cores (base_root.py)
"""

from __future__ import annotations

import functools
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from swe_rl.sandbox import cgroup
from swe_rl.sandbox.oci.machine import has_sys_admin

_LOG = logging.getLogger(__name__)
_FEATURES = {  # what needs which kernel, and what happens without
    (5, 12): "files of a task's layer are copied into memory at each start (no id-mapped mounts)",
    (5, 8): "deleted files of a container image cannot be marked by an ordinary user (no unprivileged whiteouts)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One limit on this machine."""

    name: str
    how: str
    gap: str = ""  # what is not kept, "" if it is exact
    cure: str = ""


def kernel_version() -> tuple[int, int]:
    """Major and minor number of the running kernel."""
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()) or 0)


@functools.cache
def bounds() -> tuple[Bound, ...]:
    """Every limit, in the order of Limits."""
    return (_memory(), _swap(), _processes(), _cpu(), _files())


def _memory() -> Bound:
    found = cgroup.parent()
    if found is not None:
        version = 2 if found[1] == "memory.max" else 1
        return Bound(name="memory", how=f"cgroup version {version} below {found[0]}")
    return Bound(
        name="memory",
        how="the supervisor looks every 15 ms",
        gap="a burst may exceed Limits.memory_bytes for some milliseconds",
        cure="run as root, or in a delegated cgroup: systemd-run --user --scope -p Delegate=yes swe-rl ...",
    )


def _swap() -> Bound:
    found = cgroup.parent()
    has_swap = len(Path("/proc/swaps").read_text().splitlines()) > 1
    if not has_swap:
        return Bound(name="swap", how="this machine has none")
    if found is not None and found[1] == "memory.max":
        return Bound(name="swap", how="memory.swap.max = 0")
    if found is not None and os.path.exists(f"{found[0]}/memory.memsw.limit_in_bytes"):
        return Bound(name="swap", how="memory and swap together (memsw)")
    return Bound(
        name="swap",
        how="none",
        gap="a sandbox may push memory into swap beyond Limits.memory_bytes",
        cure="swapoff -a, or boot with swapaccount=1",
    )


def _processes() -> Bound:
    if os.geteuid() == 0 and not has_sys_admin():
        return Bound(
            name="processes",
            how="the supervisor counts every 15 ms",
            gap="root of a container is exempt from RLIMIT_NPROC",
            cure="run as an ordinary user in the container, or start it with --privileged",
        )
    return Bound(name="processes", how="RLIMIT_NPROC of the user namespace, and the supervisor's count")


def _cpu() -> Bound:
    place = cgroup.cpu_parent() if cgroup.parent() is not None else None
    if place is not None:
        return Bound(name="cpu", how=f"a quota below {place} where Limits.cpus is set")
    return Bound(
        name="cpu",
        how="the scheduler's even share, and libraries that are told of one core",
        gap="Limits.cpus cannot be kept: a sandbox may use every core",
        cure="run as root, or in a delegated group that has the cpu controller",
    )


def _files() -> Bound:
    lacking = [text for needed, text in _FEATURES.items() if kernel_version() < needed]
    cure = "a newer kernel" if lacking else ""
    return Bound(name="files", how="one tmpfs of Limits.disk_bytes, overlay mounts", gap="; ".join(lacking), cure=cure)


@functools.cache
def name_gaps_once() -> None:
    """Says, once in a process, which limits are not kept exactly here."""
    for bound in bounds():
        if bound.gap:
            _LOG.warning("sandbox limit on %s: %s (%s); swe-rl doctor", bound.name, bound.gap, bound.how)
