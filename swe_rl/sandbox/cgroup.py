"""Which cgroups a sandbox gets: one of its own where the owner may make one, else none.

Without one the supervisor's watch over resident sizes bounds memory alone. With one the kernel does it exactly, pages
in no process's resident size included. A bound on processor time needs one. Both cgroup versions work; other
controllers are not needed, since processes are counted by RLIMIT_NPROC in the sandbox's user namespace.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from collections.abc import Iterator

from swe_rl.sandbox.owner import owner_label

PREFIX = "swe-rl-"
_V1, _V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"
_V1_CPU = "/sys/fs/cgroup/cpu"
_PERIOD_US = 100_000  # of processor time; the kernel's own default
_numbers = itertools.count()


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _candidates() -> Iterator[tuple[str, str]]:
    """Directories whose children can limit memory, and the file that sets the limit."""
    groups = [line.split(":", 2) for line in _read("/proc/self/cgroup").splitlines()]
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            yield os.path.normpath(_V1 + path), "memory.limit_in_bytes"
    for _, controllers, path in groups:
        while controllers == "":  # version 2: the nearest ancestor that hands the controller down
            if "memory" in _read(f"{_V2}{path}/cgroup.subtree_control").split():
                yield os.path.normpath(_V2 + path), "memory.max"
                break
            if path == "/":
                break
            path = os.path.dirname(path)


@functools.cache
def parent() -> tuple[str, str] | None:
    """(directory to make groups in, name of their limit file), or None when only watching is possible.

    Moving a process needs rights on the common ancestor: a user has them in a subtree that was delegated to it.
    """
    return next((found for found in _candidates() if _may_use(found[0])), None)


def _may_use(path: str) -> bool:
    return os.access(path, os.W_OK) and os.access(f"{path}/cgroup.procs", os.W_OK)


@functools.cache
def cpu_parent() -> str | None:
    """Directory to make groups in that bound processor time; None when nothing can."""
    found = parent()
    if found is not None and found[1] == "memory.max":
        return found[0] if "cpu" in _read(f"{found[0]}/cgroup.subtree_control").split() else None
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        place = os.path.normpath(_V1_CPU + path)
        if "cpu" in controllers.split(",") and _may_use(place):
            return place
    return None


def places() -> list[str]:
    """Directories in which groups of sandboxes are."""
    found = parent()
    return list(dict.fromkeys(place for place in (found and found[0], cpu_parent()) if place))


def cpu_limit(group: str, cpus: float) -> tuple[str, str] | None:
    """(directory, "FILE VALUE") that gives the sandbox of the memory group `group` the time of `cpus` processors."""
    place, quota_us = cpu_parent(), max(int(cpus * _PERIOD_US), 1000)
    if place is None or not cpus:
        return None
    version_2 = os.path.dirname(group) == place
    return (
        f"{place}/{os.path.basename(group)}",
        f"cpu.max {quota_us} {_PERIOD_US}" if version_2 else f"cpu.cfs_quota_us {quota_us}",
    )


def new_group() -> tuple[str, str] | None:
    """A name for one more group, which the launcher makes and removes, and its limit file."""
    found = parent()
    return found and (f"{found[0]}/{PREFIX}{owner_label()}-{next(_numbers)}", found[1])


def remove_when_empty(path: str, *, tries: int = 50) -> None:
    """For a launcher that was killed before it could: tries again for a second while the last processes leave."""
    further = cpu_parent()
    left = [place for place in (path, f"{further}/{os.path.basename(path)}") if not _remove(place)]
    if left and tries:
        asyncio.get_running_loop().call_later(0.02, lambda: remove_when_empty(path, tries=tries - 1))


def _remove(path: str) -> bool:
    """Whether it is gone."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True  # the launcher did it
    except OSError:
        return False
    return True
