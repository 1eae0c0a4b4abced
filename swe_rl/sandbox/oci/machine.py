"""What the store needs to know of the machine: who owns files of images, whose a process id is, whole trees."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
from pathlib import Path

OUTSIDE_COMMAND = 65521  # csrc/sandboxd/sandboxd.h: who commands of a sandbox of root are outside
_CAP_SYS_ADMIN = 1 << 21


def has_sys_admin() -> bool:
    """Whether this process may mount as root does, so that the sandboxes it starts have ids of their own outside."""
    with open("/proc/self/status") as file:
        line = next((line for line in file if line.startswith("CapEff:")), "CapEff: 0")
    return os.geteuid() == 0 and bool(int(line.split()[1], 16) & _CAP_SYS_ADMIN)


def owner_of_files(*, as_root: bool | None = None) -> tuple[int, int]:
    """uid and gid that the files of images must have outside, for sandboxes that this process starts."""
    if has_sys_admin() if as_root is None else as_root:
        return OUTSIDE_COMMAND, OUTSIDE_COMMAND
    return os.geteuid(), os.getegid()


@functools.lru_cache(maxsize=4)
def machine_label(_pid: int) -> str:
    """This machine, since its boot, and this PID namespace: where process ids mean the same."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def flush(path: Path) -> None:
    """syncfs(2): all written files of that file system reach the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Removes a tree whose directories may forbid it to an ordinary user."""
    todo = [str(path)] if os.geteuid() and path.is_dir() else []
    while todo:
        folder = todo.pop()
        os.chmod(folder, 0o700)
        with os.scandir(folder) as entries:
            todo += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    shutil.rmtree(path, ignore_errors=True)
