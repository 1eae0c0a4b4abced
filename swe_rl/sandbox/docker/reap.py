"""Removes containers whose owner has died or whose lease is over, and the directories that dead owners left."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from swe_rl.errors import SandboxError, SandboxUnavailable
from swe_rl.sandbox.docker.door import PREFIX
from swe_rl.sandbox.docker.engine import Engine
from swe_rl.sandbox.docker.labels import DEADLINE_LABEL, NAMESPACE_LABEL, OWNER_LABEL, pid_namespace

LATE_S = 30.0  # the supervisor ends by itself at its deadline; this is for one that did not


def reap_containers(is_alive: Callable[[str], bool]) -> int:
    """Removes what is left of dead owners (`is_alive` judges their labels) and of ended leases; returns how many.

    0 where there is no engine. Owners in another PID namespace, which cannot be judged from here, lose only what
    outlived its lease. Raises SandboxError when the engine is there and fails.
    """
    _reap_directories(is_alive)
    try:
        engine = Engine.shared()
    except SandboxUnavailable:
        return 0
    count = 0
    for container in engine.containers(OWNER_LABEL):
        if _is_left(container["Labels"], is_alive):
            try:
                engine.remove(container["Id"])
            except SandboxError:
                continue  # the next reaper tries again; the others must not wait for it
            count += 1
    return count


def _is_left(labels: Mapping[str, str], is_alive: Callable[[str], bool]) -> bool:
    deadline = labels.get(DEADLINE_LABEL, "")
    if deadline.isdigit() and time.monotonic() > int(deadline) + LATE_S:
        return True
    ours = labels.get(NAMESPACE_LABEL) == pid_namespace()
    return ours and not is_alive(labels[OWNER_LABEL])


def _reap_directories(is_alive: Callable[[str], bool]) -> None:
    ours = f"{PREFIX}{pid_namespace()}-"  # of owners elsewhere nothing can be said
    for path in Path(tempfile.gettempdir()).glob(f"{ours}*"):
        label = path.name.removeprefix(ours).rpartition("-")[0]
        if "-" in label and not is_alive(label):
            shutil.rmtree(path, ignore_errors=True)
