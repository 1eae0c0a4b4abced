"""Removes what sandboxes of dead owners left on this machine.

Of local sandboxes nothing should be left: the kernel removes processes and mounts, the launcher its cgroup. This is for
the case that launchers were killed by hand, for the temporary trees of isolation="none", and for heartbeat files.
A pool runs it at its start, now and then, and at its end; `swe-rl sandbox reap` does on demand.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from swe_rl.errors import SandboxError
from swe_rl.sandbox import bare, cgroup
from swe_rl.sandbox.launch import OWNER_ARGUMENT, PROGRAM
from swe_rl.sandbox.owner import is_alive, reap_leases

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    processes: int
    cgroups: int
    directories: int
    containers: int
    leases: int  # heartbeat files; they are left by every kill and are no sandboxes

    @property
    def total(self) -> int:
        """What was left of sandboxes."""
        return self.processes + self.cgroups + self.directories + self.containers


def reap() -> Reaped:
    """Kills launchers and supervisors, removes cgroups, directories, containers and heartbeat files of dead owners;
    returns how many. An owner that has stopped beating counts as dead (owner.py)."""
    found = {"processes": _reap_processes(), "cgroups": _reap_cgroups(), "directories": _reap_directories()}
    return Reaped(**found, containers=_reap_containers(), leases=reap_leases())


def _reap_processes() -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if words[0] != PROGRAM or not words[1].startswith(OWNER_ARGUMENT):
                continue
            if not is_alive(words[1].removeprefix(OWNER_ARGUMENT)):
                os.kill(int(entry.name), signal.SIGKILL)
                count += 1
        except (OSError, IndexError):
            continue  # it ended meanwhile, or is not ours to end
    return count


def _reap_cgroups() -> int:
    places = cgroup.places()
    return sum(_remove_group(path) for place in places for path in Path(place).glob(f"{cgroup.PREFIX}*-*-*"))


def _remove_group(path: Path) -> bool:
    label = path.name.removeprefix(cgroup.PREFIX).rpartition("-")[0]
    if is_alive(label):
        return False
    for _ in range(50):
        try:
            pids = [int(pid) for pid in (path / "cgroup.procs").read_text().split()]
            if 0 in pids:  # of another PID namespace, whose owners cannot be seen from here; and kill(0) is us
                return False
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            path.rmdir()
            return True
        except FileNotFoundError:
            return False
        except OSError:
            time.sleep(0.01)  # its processes are still on their way out
    return False


def _reap_containers() -> int:
    from swe_rl.sandbox.docker import reap_containers

    try:
        return reap_containers(is_alive)
    except SandboxError as err:  # an engine in trouble: the next reaper sees to it
        log.warning("containers of dead owners were not looked for: %s", err)
        return 0


def _reap_directories() -> int:
    count = 0
    for path in Path(tempfile.gettempdir()).glob(f"{bare.PREFIX}*"):
        label = path.name.removeprefix(bare.PREFIX).rpartition("-")[0]
        if "-" in label and not is_alive(label):
            shutil.rmtree(path, ignore_errors=True)
            count += 1
    return count
