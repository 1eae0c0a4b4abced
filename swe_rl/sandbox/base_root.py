"""What a local sandbox sees of the host, and its environment: the policy that csrc/sandboxd carries out.

Visible, read-only: the system's programs and libraries, and the prefix of the running Python. Everything else of the
host (home directories, the checkout, /etc, /var, /run, other users) is absent, not merely unreadable. Directories of
installed Python packages are empty inside: one of them may hold correct code of a task, or this package. A task that
needs packages brings them as a mount.

With an image none of that is there: its layers are the root, and only /dev, /proc, /etc/hosts and /etc/hostname are
ours. Its variables count, but not for how many threads a command starts: a sandbox has a share of the machine, and
libraries that count the machine's cores would start one for each.
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
import site
import sys
from collections.abc import Mapping
from pathlib import Path

from swe_rl.sandbox import egress, wire
from swe_rl.sandbox.cgroup import cpu_limit
from swe_rl.sandbox.oci import Image, ImageStore, default_store
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
_PACKAGES = (  # below a prefix, then below a library directory, then what conda keeps
    *(f"{folder}/{kind}-packages" for folder in ("/lib*/python*", "/python*") for kind in ("site", "dist")),
    "/pkgs",
    "/envs",
)
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/ptmx": "pts/ptmx",
    "/var/tmp": "../tmp",
    "/etc/mtab": "/proc/self/mounts",
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
}
_THREADS = dict.fromkeys(
    (
        "PYTHON_CPU_COUNT",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "RAYON_NUM_THREADS",
        "GOMAXPROCS",
        "CARGO_BUILD_JOBS",
        "CMAKE_BUILD_PARALLEL_LEVEL",
        "PYTEST_XDIST_AUTO_NUM_WORKERS",
    ),
    "1",
)
_IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of an image that sets none
_IDENTITY = {  # so that `git commit` works where /etc/gitconfig is the image's
    "GIT_AUTHOR_NAME": "agent",
    "GIT_AUTHOR_EMAIL": "agent@localhost",
    "GIT_COMMITTER_NAME": "agent",
    "GIT_COMMITTER_EMAIL": "agent@localhost",
}
_OF_BASE_ROOT = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "PYTHONNOUSERSITE")  # an image has its own


def environment(spec: SandboxSpec) -> dict[str, str]:
    """The whole environment of a command. Nothing of the owner's environment is in it."""
    if spec.image:
        return _image_environment(default_store().find(spec.image), spec)
    return {"PATH": _search_path(), **_ENV, **_THREADS, **egress.variables(spec), **spec.env}


def container_environment(own: Mapping[str, str], spec: SandboxSpec, *, user: str, home: str) -> dict[str, str]:
    """The same in a container whose image sets `own`."""
    kept = {name: value for name, value in _ENV.items() if name not in _OF_BASE_ROOT}
    account = {"HOME": home, "USER": user, "LOGNAME": user}
    return {"PATH": _IMAGE_PATH, **kept, **own, **account, **_THREADS, **egress.variables(spec), **spec.env}


def _image_environment(image: Image, spec: SandboxSpec) -> dict[str, str]:
    kept = {name: value for name, value in _ENV.items() if name not in _OF_BASE_ROOT}
    own = dict(text.partition("=")[::2] for text in image.env if "=" in text)
    given = {"PATH": _IMAGE_PATH, "HOME": image.home, "SHELL": image.shell, **kept, **_IDENTITY}
    return {**given, **own, **_THREADS, **egress.variables(spec), **spec.env}


@functools.cache
def _search_path() -> str:
    """The usual directories, and git's own where it lies elsewhere in what is visible (/nix/store, a conda prefix)."""
    found = [f"{sys.base_prefix}/bin", "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    git = os.path.realpath(shutil.which("git") or "/bin/git")
    if os.path.dirname(git) not in found and _is_visible(git):
        found.append(os.path.dirname(git))
    return ":".join(found)


def _is_visible(path: str | Path) -> bool:
    places = (*_SYSTEM, str(Path(sys.base_prefix).resolve()))
    return any(Path(path).is_relative_to(place) for place in places)


def package_directories() -> list[str]:
    """Directories, none inside another, that hold installed Python packages or a checkout of this one: their paths
    inside."""
    roots = ("/usr/local", sys.base_prefix, *(path for path in _SYSTEM if not os.path.islink(path)))
    found = {*site.getsitepackages(), str(Path(__file__).parents[1])}
    for root in dict.fromkeys(roots):
        for pattern in _PACKAGES:
            found.update(glob.glob(root + pattern))
    visible = sorted({real for path in found if os.path.isdir(real := os.path.realpath(path)) and _is_visible(real)})
    tops = [path for path in visible if not any(path != top and Path(path).is_relative_to(top) for top in visible)]
    return [_inside(path) for path in tops]


def _inside(real: str) -> str:
    """Where a visible host path is in the sandbox: the prefix may be bound under the name of a link to it."""
    prefix = Path(sys.base_prefix).resolve()
    if any(prefix.is_relative_to(path) for path in _SYSTEM) or not Path(real).is_relative_to(prefix):
        return real
    return str(Path(sys.base_prefix, Path(real).relative_to(prefix)))


@functools.cache
def shell_path() -> str:
    return next((path for path in ("/bin/bash", "/usr/bin/bash") if os.access(path, os.X_OK)), "/bin/sh")


@functools.cache
def _base_items() -> bytes:
    """All that does not depend on the spec. Later items may lie inside earlier ones, so the order matters."""
    parts = []
    for path in _SYSTEM:
        if os.path.islink(path):
            parts.append(wire.item(wire.LINK, path, os.readlink(path)))
        elif os.path.isdir(path):
            parts.append(wire.item(wire.BIND, path, path))
    prefix = Path(sys.base_prefix).resolve()
    if not any(prefix.is_relative_to(path) for path in _SYSTEM):
        parts.append(wire.item(wire.BIND, sys.base_prefix, str(prefix)))
    parts += [wire.item(wire.EMPTY, path) for path in package_directories()]
    parts += [wire.item(wire.BIND, path, os.path.realpath(path)) for path in _ETC_SHARED if os.path.exists(path)]
    parts += [wire.item(wire.FILE, path, content) for path, content in _ETC.items()]
    parts += _device_items()
    parts += [wire.item(wire.LINK, path, target) for path, target in _LINKS.items()]
    parts.append(wire.item(wire.SHELL_PATH, shell_path()))
    return b"".join(parts)


def _device_items() -> list[bytes]:
    return [wire.item(wire.DEVICE, f"/dev/{name}", f"/dev/{name}") for name in _DEVICES]


def _image_items(store: ImageStore, image: Image) -> bytes:
    """The root is the image; what every container gets beside it lies over that."""
    parts = [
        wire.item(wire.IMAGE, str(store.root / "layers"), ":".join(reversed(image.layers))),
        wire.item(wire.USER, str(image.uid), str(image.gid)),
        *_device_items(),
        *(wire.item(wire.LINK, path, target) for path, target in _LINKS.items() if path.startswith("/dev/")),
        *(wire.item(wire.BIND, f"/etc/{name}", str(store.file(name))) for name in ("hosts", "hostname")),
        wire.item(wire.SHELL_PATH, image.shell),
    ]
    return b"".join(parts)


def _root_items(spec: SandboxSpec, flags: int) -> bytes:
    if not spec.image:
        return _base_items()
    store = default_store()
    return _image_items(store, store.open(spec.image, as_root=False if flags & wire.FLAG_USERNS else None))


def setup_body(spec: SandboxSpec, *, cgroup: tuple[str, str] | None = None, flags: int = 0) -> bytes:
    """Body of the SETUP frame. `cgroup` is a directory to create and the name of the limit file in it.

    Raises ImageError when the image is not imported or of no use here.
    """
    limits = spec.limits
    parts = [
        wire.numbers(
            memory=limits.memory_bytes,
            pids=limits.pids,
            disk=limits.disk_bytes,
            lease_ms=int(limits.lease_s * 1000),
            owner=os.getpid(),
            flags=flags,
        ),
        _root_items(spec, flags),
        wire.item(wire.WORKDIR, spec.workdir),
    ]
    parts += [wire.item(wire.BIND, target, os.path.abspath(source)) for source, target in spec.readonly_mounts]
    parts += [wire.item(wire.LAYER, os.path.abspath(layer)) for layer in spec.layers]
    parts += [wire.item(wire.ENV, f"{name}={value}") for name, value in environment(spec).items()]
    if cgroup:
        parts.append(wire.item(wire.CGROUP, *cgroup))
        if share := cpu_limit(cgroup[0], limits.cpus):
            parts.append(wire.item(wire.CPU, *share))
    return b"".join(parts)
