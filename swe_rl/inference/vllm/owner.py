"""Engine processes end with whoever started them: vLLM's own do not when that one is killed outright."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path

OWNER = "SWE_RL_ENGINE_OWNER"  # environment variable: process id and start time of the owner
LOOK_S = 1.0
LOCKED = "weights"  # file in a folder of weights, locked by the process that writes it
_LEFT: set[Path] = set()


def name_owner(environment: MutableMapping[str, str]) -> None:
    """Tells engine processes started with `environment` that they belong to this process."""
    environment[OWNER] = f"{os.getpid()}:{_started(os.getpid())}"


def watch_owner() -> None:
    """Ends this process, and the engine process above it, soon after the named owner has ended; nothing without one."""
    owner, _, started = os.environ.get(OWNER, "").partition(":")
    if owner:
        arguments = (int(owner), started, os.getppid())
        threading.Thread(target=_watch, args=arguments, name="swe-rl-owner", daemon=True).start()


def remove_with_owner(folder: Path) -> None:
    """This process removes `folder` when the named owner has ended, and whoever writes the weights in it has, too."""
    _LEFT.add(folder)


def remove_unlocked(folder: Path) -> bool:
    """Removes a folder of weights unless the process that writes them lives; whether it did."""
    try:
        with open(folder / LOCKED, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in use, somebody else's, or gone
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def _watch(owner: int, started: str, parent: int) -> None:
    while _started(owner) == started:
        time.sleep(LOOK_S)
    for folder in set(_LEFT):
        remove_unlocked(folder)
    if parent != owner and os.getppid() == parent:  # else it is gone, and its number may be somebody else's
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot; "" when there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
