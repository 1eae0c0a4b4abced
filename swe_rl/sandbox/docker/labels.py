"""What every container of ours says about itself: whose it is and until when, for the reaper and for whoever looks."""

from __future__ import annotations

import os
import time

from swe_rl.sandbox.owner import owner_label, run_id

OWNER_LABEL, RUN_LABEL = "swe-rl.owner", "swe-rl.run"
DEADLINE_LABEL = "swe-rl.until"  # seconds of this machine's monotonic clock: the other one jumps
NAMESPACE_LABEL = "swe-rl.pid-namespace"


def pid_namespace() -> str:
    """Number of the namespace in which the owner's process id means something."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


def labels(lease_s: float) -> dict[str, str]:
    """Of a container that this process makes now."""
    return {
        OWNER_LABEL: owner_label(),
        RUN_LABEL: run_id(),
        DEADLINE_LABEL: str(int(time.monotonic() + lease_s) + 1),
        NAMESPACE_LABEL: pid_namespace(),
    }
