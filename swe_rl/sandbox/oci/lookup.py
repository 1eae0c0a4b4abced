"""What a path of an image is, over its stack of layers: whiteouts and opaque directories hide what is below."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

OPAQUE_XATTRS = ("user.overlay.opaque", "trusted.overlay.opaque")
_MAX_LINKS = 40  # as the kernel


def is_whiteout(info: os.stat_result) -> bool:
    """Whether overlayfs takes it for "deleted here": a character device 0, 0."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_opaque(directory: str | Path) -> bool:
    """Whether it hides the directories of the same name below."""
    for name in OPAQUE_XATTRS:
        try:
            if os.getxattr(directory, name, follow_symlinks=False) == b"y":
                return True
        except OSError:
            continue  # not set, or not ours to read
    return False


def find(layers: Sequence[Path], path: str) -> Path | None:
    """The file or directory that `path` (relative, links not followed) shows; layers from top to bottom."""
    candidates = list(layers)
    found: Path | None = candidates[0] if candidates else None
    for part in [part for part in path.split("/") if part not in ("", ".")]:
        found, candidates = _step(candidates, part)
        if found is None:
            return None
    return found


def _step(directories: Sequence[Path], name: str) -> tuple[Path | None, list[Path]]:
    """One component further: what it is, and the directories of that name that are merged."""
    found: Path | None = None
    merged: list[Path] = []
    for directory in directories:
        path = directory / name
        try:
            info = path.lstat()
        except OSError:
            continue
        if is_whiteout(info):
            break
        found = found or path
        if not stat.S_ISDIR(info.st_mode):
            break
        merged.append(path)
        if is_opaque(path):
            break
    return found, merged


def resolve(layers: Sequence[Path], path: str) -> Path | None:
    """As `find`, but links are followed, absolute ones too, and never out of the image."""
    done: list[str] = []
    todo = [part for part in path.split("/") if part not in ("", ".")]
    for _ in range(_MAX_LINKS * 100):
        if not todo:
            return find(layers, "/".join(done))
        part = todo.pop(0)
        if part == "..":
            done = done[:-1]
            continue
        found = find(layers, "/".join([*done, part]))
        if found is None:
            return None
        if found.is_symlink():
            target = os.readlink(found)
            done = [] if target.startswith("/") else done
            todo = [piece for piece in target.split("/") if piece not in ("", ".")] + todo
            continue
        done.append(part)
    return None  # a loop
