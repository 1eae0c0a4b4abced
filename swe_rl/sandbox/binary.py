"""Where the static sandbox binary is; builds it on demand in a source checkout."""

from __future__ import annotations

import fcntl
import functools
import subprocess
from pathlib import Path

from swe_rl.errors import SandboxUnavailable

_BIN = Path(__file__).parent / "bin"
_SOURCES = Path(__file__).parents[2] / "csrc" / "sandboxd"


def _is_current(binary: Path) -> bool:
    """True when no source is newer than the binary; an installed package has no sources."""
    if not binary.exists():
        return False
    built = binary.stat().st_mtime
    return all(source.stat().st_mtime <= built for source in _SOURCES.glob("*.[ch]"))


def _build(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with open(target / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may start at once after a pull
        if _is_current(target / "swe-sandboxd"):
            return
        done = subprocess.run(["sh", str(_SOURCES / "build.sh"), str(target)], capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise SandboxUnavailable(f"the sandbox binary cannot be built: {lines[-1]}")


@functools.cache
def sandboxd_path() -> str:
    """Path of the binary, built first if this is a checkout and it is missing or older than its sources.

    Raises SandboxUnavailable when there is neither a binary nor a way to build it.
    """
    binary = _BIN / "swe-sandboxd"
    if _SOURCES.is_dir() and not _is_current(binary):
        try:
            _build(_BIN)
        except OSError as err:
            if not binary.exists():
                raise SandboxUnavailable(f"the sandbox binary cannot be built into {_BIN}: {err.strerror}") from err
    if not binary.exists():
        raise SandboxUnavailable(
            "the sandbox binary is missing: install a C compiler (gcc and libc6-dev, or musl-tools), then swe-rl again"
        )
    return str(binary)
