"""Open files for many sandboxes: systems start a process with 1024, and let it ask for more."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

OTHERS = 512  # files, connections, libraries of this process
PER_SANDBOX = 6  # a stream, a process to watch, a socket to listen at, and what a start or a fork needs for a moment


def allow_descriptors(num_sandboxes: int) -> None:
    """Raises the soft limit of open files as far as that many sandboxes need; says so when the hard one is lower."""
    needed = OTHERS + PER_SANDBOX * num_sandboxes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < needed:
        log.warning(
            "%d sandboxes need %d open files, but only %d are allowed: raise the hard limit (ulimit -Hn %d)",
            num_sandboxes,
            needed,
            most,
            needed,
        )
