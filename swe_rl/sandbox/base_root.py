"""What a local sandbox sees of the host, and its environment: the policy that csrc/sandboxd carries out.

Visible, read-only: the system's programs and libraries, and the prefix of the running Python. Everything else of the
host (home directories, the checkout, /etc, /var, /run, other users) is absent, not merely unreadable.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from swe_rl.sandbox import wire
from swe_rl.types import SandboxSpec

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
_ETC_SHARED = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs", "/etc/mime.types", "/etc/magic")
_ETC = {
    "/etc/passwd": "root:x:0:0:root:/:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "/etc/group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/hostname": "sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "/etc/gitconfig": "[user]\n\tname = agent\n\temail = agent@localhost\n[safe]\n\tdirectory = *\n"
    "[init]\n\tdefaultBranch = main\n[gc]\n\tauto = 0\n[advice]\n\tdetachedHead = false\n",
}
_ENV = {
    "HOME": "/home/agent",
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TMPDIR": "/tmp",
    "TERM": "dumb",
    "COLUMNS": "200",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "PYTHONUNBUFFERED": "1",  # partial output must be there when a command is killed
    "PYTHONDONTWRITEBYTECODE": "1",  # no __pycache__ in the patch
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "PYTHON_CPU_COUNT": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def environment(spec: SandboxSpec) -> dict[str, str]:
    """The whole environment of a command. Nothing of the owner's environment is in it."""
    path = f"{sys.base_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, **_ENV, **spec.env}


@functools.cache
def shell_path() -> str:
    return next((path for path in ("/bin/bash", "/usr/bin/bash") if os.access(path, os.X_OK)), "/bin/sh")


@functools.cache
def _base_items() -> bytes:
    parts = []
    for path in _SYSTEM:
        if os.path.islink(path):
            parts.append(wire.tagged(wire.LINK, wire.text(os.readlink(path)), wire.text(path)))
        elif os.path.isdir(path):
            parts.append(_bind(path, path))
    prefix = Path(sys.base_prefix).resolve()
    if not any(prefix.is_relative_to(path) for path in _SYSTEM):
        parts.append(_bind(str(prefix), sys.base_prefix))
    parts += [_bind(os.path.realpath(path), path) for path in _ETC_SHARED if os.path.exists(path)]
    parts += [wire.tagged(wire.FILE, wire.text(path), wire.blob(content.encode())) for path, content in _ETC.items()]
    parts.append(wire.tagged(wire.LINK, wire.text("../tmp"), wire.text("/var/tmp")))
    return b"".join(parts)


def _bind(source: str, target: str) -> bytes:
    return wire.tagged(wire.BIND, wire.text(source), wire.text(target))


def setup_body(spec: SandboxSpec, *, cgroup: str | None = None, flags: int = 0) -> bytes:
    """Body of the SETUP frame. Later items may lie inside earlier ones, so the order matters."""
    limits = spec.limits
    parts = [_base_items(), wire.tagged(wire.WORKDIR, wire.text(spec.workdir))]
    parts += [_bind(os.path.abspath(source), target) for source, target in spec.readonly_mounts]
    parts += [wire.tagged(wire.LAYER, wire.text(os.path.abspath(layer))) for layer in spec.layers]
    parts += [wire.tagged(wire.ENV, wire.text(f"{name}={value}")) for name, value in environment(spec).items()]
    parts.append(wire.tagged(wire.SHELL_PATH, wire.text(shell_path())))
    if cgroup:
        parts.append(wire.tagged(wire.CGROUP, wire.text(cgroup)))
    parts += [
        wire.number(wire.MEMORY, limits.memory_bytes),
        wire.number(wire.PIDS, limits.pids),
        wire.number(wire.DISK, limits.disk_bytes),
        wire.number(wire.LEASE_MS, int(limits.lease_s * 1000)),
        wire.number(wire.OWNER, os.getpid()),
        wire.number(wire.FLAGS, flags),
    ]
    return b"".join(parts)
