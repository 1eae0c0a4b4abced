"""Starting the launcher of a local sandbox, and what its refusal means."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
from dataclasses import replace

from swe_rl.errors import SandboxError, SandboxUnavailable
from swe_rl.sandbox.binary import sandboxd_path
from swe_rl.sandbox.enforcement import name_gaps_once
from swe_rl.sandbox.oci import default_store
from swe_rl.sandbox.owner import owner_label
from swe_rl.sandbox.spec_check import NO_WORKDIR, check_spec
from swe_rl.types import SandboxSpec

PROGRAM = "swe-sandboxd"
_DEFAULT_WORKDIR = SandboxSpec().workdir
OWNER_ARGUMENT = "owner="  # in the launcher's command line, for reap.py and for whoever looks at `ps`
_PERMISSION_ERRNOS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EUSERS, errno.ENOSPC, errno.EINVAL)
_CURE = (
    "run as root, allow user namespaces (sysctl user.max_user_namespaces > 0, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container: --privileged), "
    "or set sandbox.isolation=none for code you trust"
)


def prepared(spec: SandboxSpec) -> SandboxSpec:
    """The spec with the work directory that counts. Raises ConfigError for what no local sandbox can honour."""
    name_gaps_once()
    if spec.image:
        spec = _with_workdir_of_image(spec)
    brings_workdir = bool(spec.image) and not spec.layers  # then all of the image may be written
    check_spec(spec, no_workdir=() if brings_workdir else NO_WORKDIR)
    return spec


def _with_workdir_of_image(spec: SandboxSpec) -> SandboxSpec:
    """With layers they are at `workdir`. Without, the image has the work directory: the one of the spec if it is not
    just the default or the image has that (images of tasks do), else the image's own."""
    image = default_store().find(spec.image)
    workdir = spec.workdir
    if not spec.layers and workdir == _DEFAULT_WORKDIR and not image.has_testbed:
        workdir = image.workdir
    return replace(spec, workdir=workdir)


def spawn(theirs: socket.socket) -> int:
    """Starts the launcher by posix_spawn, which is vfork: cheap however much memory this process maps."""
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    return os.posix_spawn(
        sandboxd_path(),
        [PROGRAM, OWNER_ARGUMENT + owner_label()],
        {},
        file_actions=[*null, (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)],
        setsigmask=(),
        setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT),
    )


def failure_of(body: bytes) -> SandboxError:
    """The exception for a FAILED frame: the machine forbids it, or something else went wrong."""
    code, reason = struct.unpack_from("<I", body)[0], body[4:].decode(errors="replace")
    if code in _PERMISSION_ERRNOS and not reason.startswith("/"):
        return SandboxUnavailable(f"this machine allows no sandbox ({reason}): {_CURE}")
    return SandboxError(f"the sandbox could not be made: {reason}")
