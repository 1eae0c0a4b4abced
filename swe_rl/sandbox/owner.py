"""Names that tie what a sandbox leaves visible on the host to the process that owns it."""

from __future__ import annotations

import functools
import os


def _start_ticks(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot; None when there is none. Tells a recycled pid apart."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[19].decode()
    except (FileNotFoundError, ProcessLookupError):
        return None


@functools.lru_cache(maxsize=1)
def _label(pid: int) -> str:
    return f"{pid}-{_start_ticks(pid)}"


def owner_label() -> str:
    """ "PID-START" of this process."""
    return _label(os.getpid())


def is_alive(label: str) -> bool:
    """False when the process behind "PID-START" has ended; True for a label that is none of ours."""
    pid, _, start = label.partition("-")
    return not pid.isdigit() or _start_ticks(int(pid)) == start
