"""What no sandbox can honour, whichever backend makes it, said in one line before anything is started."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from swe_rl.egress_pair import egress_pair
from swe_rl.errors import ConfigError, SandboxError
from swe_rl.sandbox import wire
from swe_rl.types import Limits, SandboxSpec

INSIDE = "/.swe-rl"  # ours, in a container
NO_WORKDIR = ("/", "/tmp")  # places that are something else already
_KERNEL = ("/proc", "/dev", "/sys")
_MAX_LAYERS, _MAX_NAME = 64, 255  # MAX_LAYERS of csrc/sandboxd/frame.h; bytes of one part of a path
_MAX_VARIABLES, _MAX_VARIABLE, _MAX_ENV = 256, 128 << 10, 1 << 20  # MAX_ENV with ours; the kernel's; bytes of all
_RANGES = {
    "cpus": (0.0, 1e6),
    "memory_bytes": (1, 1 << 50),
    "pids": (1, 1 << 22),
    "disk_bytes": (1, 1 << 50),
    "output_bytes": (1, wire.MAX_KEEP),
    "output_kill_bytes": (1, 1 << 62),
    "lease_s": (0.001, 1e9),
}


def check_spec(spec: SandboxSpec, *, no_workdir: Collection[str] = NO_WORKDIR) -> None:
    """Raises ConfigError for a spec that no sandbox can honour, SandboxError for a layer that is not there."""
    if spec.workdir.startswith("/") and _normal(spec.workdir) in no_workdir:
        raise ConfigError(f"SandboxSpec.workdir={spec.workdir!r} must be an absolute directory of its own, as /testbed")
    _check_place("workdir", spec.workdir, closed=(*_KERNEL, INSIDE))
    for _, place in spec.readonly_mounts:
        if _normal(place) == "/":
            raise ConfigError("SandboxSpec.readonly_mounts: nothing can be mounted at '/'")
        _check_place("readonly_mounts", place, closed=(INSIDE,))
    _check_env(spec.env)
    _check_limits(spec.limits)
    for entry in spec.egress:
        egress_pair(entry)
    if len(spec.layers) > _MAX_LAYERS:
        raise ConfigError(f"SandboxSpec.layers has {len(spec.layers)} entries: merge some, at most {_MAX_LAYERS}")
    missing = [layer for layer in spec.layers if not os.path.isdir(layer)]
    if missing:
        raise SandboxError(f"layer {missing[0]!r} is not a directory")


def _normal(path: str) -> str:
    """With one slash at the start: POSIX lets normpath keep two."""
    return "/" + os.path.normpath(path).lstrip("/")


def _check_place(what: str, path: str, *, closed: Collection[str]) -> None:
    shown = f"SandboxSpec.{what}={path[:100]!r}"
    if not path.startswith("/"):
        raise ConfigError(f"{shown} must be an absolute path, as /testbed")
    encoded = wire.encoded(path)
    if encoded is None or b"\0" in encoded:
        raise ConfigError(f"{shown} holds a character that no path can hold")
    if len(encoded) > 4095 or any(len(part) > _MAX_NAME for part in encoded.split(b"/")):
        raise ConfigError(f"{shown} is too long for a path")
    if any((_normal(path) + "/").startswith(place + "/") for place in closed):
        raise ConfigError(f"{shown} is not free: choose a directory outside {', '.join(closed)}")


def _check_env(env: Mapping[str, str]) -> None:
    total = 0
    for name, value in env.items():
        entry = wire.encoded(f"{name}={value}")
        if not name or "=" in name or entry is None or b"\0" in entry:
            raise ConfigError(f"SandboxSpec.env: {name[:100]!r} is no variable: names have no '=', neither part a NUL")
        if len(entry) >= _MAX_VARIABLE:
            raise ConfigError(f"SandboxSpec.env: {name[:100]!r} is too long: at most {_MAX_VARIABLE} bytes")
        total += len(entry)
    if len(env) > _MAX_VARIABLES or total > _MAX_ENV:
        most = f"{_MAX_VARIABLES} variables and {_MAX_ENV} bytes"
        raise ConfigError(f"SandboxSpec.env has {len(env)} variables of {total} bytes: at most {most}")


def _check_limits(limits: Limits) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(limits, name)
        if not low <= value <= high:  # also when it is no number
            raise ConfigError(f"Limits.{name}={value} must be between {low} and {high}")
