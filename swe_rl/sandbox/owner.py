"""Names that tie what a sandbox leaves visible on the host to the process that owns it, and the owner's heartbeat.

A label is "PID-START": the process and when it started, so that a recycled pid is told apart. An owner with a pool also
beats, once for all of its sandboxes: one small file says that it lived at that moment. Dead is whoever has ended, and
whoever has a file but has not beaten for LEASE_S (stopped, or hung beyond recovery).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

log = logging.getLogger(__name__)

BEAT_S = 10.0
LEASE_S = 180.0  # far more than a busy machine delays a thread; monotonic time, which stands still in a suspended one


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
    """False when the process behind "PID-START" has ended or let its lease run out; True for a label that is none of
    ours."""
    pid, _, start = label.partition("-")
    if not pid.isdigit():
        return True
    return _start_ticks(int(pid)) == start and not _has_expired(label)


def leases_dir() -> Path:
    """Where the heartbeats of this user's owners are."""
    return Path(tempfile.gettempdir(), f"swe-rl-owners-{os.geteuid()}")


def reap_leases() -> int:
    """Removes the heartbeat files of dead owners; returns how many."""
    count = 0
    for path in leases_dir().glob("*.json"):
        if not is_alive(path.stem):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                count += 1
    return count


def run_id() -> str:
    """Of the run that this process's sandboxes belong to; empty outside one."""
    lease = OwnerLease._shared
    return lease._run_id if lease is not None else ""


class OwnerLease:
    """The heartbeat of this process, beaten by a thread so that a busy event loop does not stop it.

    One per process is enough, however many pools it has; they share it by counting. `run_id` is for whoever looks.
    """

    _shared: OwnerLease | None = None
    _lock = threading.Lock()

    def __init__(self, run_id: str) -> None:
        self._path = leases_dir() / f"{owner_label()}.json"
        self._run_id = run_id
        self._users = 0
        self._has_failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="swe-rl-heartbeat", daemon=True)

    @classmethod
    def acquire(cls, run_id: str) -> Self:
        """The heartbeat of this process, started if it does not beat yet. Whoever acquires releases, once."""
        with cls._lock:
            found = cls._shared
            if found is None:
                found = cls._shared = cls(run_id)
                found._try_beat()
                found._thread.start()
            found._users += 1
            return found  # type: ignore[return-value]

    def release(self) -> None:
        """Ends the heartbeat with its last user."""
        with OwnerLease._lock:
            self._users -= 1
            if self._users:
                return
            OwnerLease._shared = None
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # somebody else's directory; the process's end says the same
            self._path.unlink(missing_ok=True)

    def _work(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._try_beat()

    def _try_beat(self) -> None:
        """A full disk must not end a run: the next beat may succeed, the lease is long, and without any beat an owner
        counts as alive while its process lives."""
        try:
            self._beat()
        except OSError as err:
            level = logging.DEBUG if self._has_failed else logging.WARNING
            log.log(level, "the heartbeat of this process cannot be written: %s", err)
            self._has_failed = True

    def _beat(self) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        text = json.dumps({"run_id": self._run_id, "owner": owner_label(), "beat_s": time.monotonic()})
        partial = self._path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(self._path)


def _has_expired(label: str) -> bool:
    """Whether that owner beats but has not for LEASE_S. Files that another user could have written do not count."""
    path = leases_dir() / f"{label}.json"
    try:
        info = path.parent.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            return False
        return time.monotonic() - json.loads(path.read_text())["beat_s"] > LEASE_S
    except (OSError, ValueError, KeyError, TypeError):
        return False
