"""Which memory cgroup a sandbox gets: one of its own where the owner may make one, else none.

Without one the supervisor's watch over resident sizes bounds memory alone. With one the kernel does it exactly, pages
in no process's resident size included. Both cgroup versions work; other controllers are not needed, since processes
are counted by RLIMIT_NPROC in the sandbox's user namespace.
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
    """(directory to make groups in, name of their limit file), or None when only watching is possible."""
    if os.geteuid() != 0:
        return None  # moving a process needs rights on the common ancestor, which a user rarely has
    return next((found for found in _candidates() if os.access(found[0], os.W_OK)), None)


def new_group() -> tuple[str, str] | None:
    """A name for one more group, which the launcher makes and removes, and its limit file."""
    found = parent()
    return found and (f"{found[0]}/{PREFIX}{owner_label()}-{next(_numbers)}", found[1])


def remove_when_empty(path: str, *, tries: int = 50) -> None:
    """For a launcher that was killed before it could: tries again for a second while the last processes leave."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass  # the launcher did it
    except OSError:
        if tries:
            asyncio.get_running_loop().call_later(0.02, lambda: remove_when_empty(path, tries=tries - 1))
