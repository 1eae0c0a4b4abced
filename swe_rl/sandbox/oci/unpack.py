"""One layer of an image, a tar stream, becomes a directory that overlayfs takes as a lower one.

Follows the OCI image-spec, "Image Layer Filesystem Changeset": `.wh.NAME` deletes NAME below, `.wh..wh..opq` hides what
lies below its directory. The archive is not trusted: every path is relative to the new directory and must lead through
directories made here, never through a link; nothing is written elsewhere and no attribute that overlayfs acts on is
taken from it. Ownership is mapped: all files belong to one id, the one that commands have outside. Device nodes are
skipped with a note; set-id bits are kept, and mean nothing where the file system is mounted nosuid.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from swe_rl.errors import ImageError
from swe_rl.sandbox.oci import lookup

MAX_HEADER_BYTES = 1 << 20  # of names and attributes of one file; the kernel keeps 64 KiB per attribute
MAX_DEPTH = 256
_MAX_XATTR_BYTES = 64 << 10
_BAD_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EINVAL, errno.ENOENT)  # not the machine's fault
_COPY = 1 << 20
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_XATTR = "SCHILY.xattr."


class _Entry(tarfile.TarInfo):
    """Refuses huge extended headers before tarfile reads them into memory."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        extended = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
        if self.type in (*extended, tarfile.SOLARIS_XHDTYPE) and self.size > MAX_HEADER_BYTES:
            raise ImageError(f"a file has {self.size} bytes of names and attributes: at most {MAX_HEADER_BYTES}")
        return super()._proc_member(tar)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Unpacked:
    size_bytes: int
    num_entries: int
    notes: tuple[str, ...]


def unpack_layer(
    stream: BinaryIO,
    target: Path,
    *,
    below: Sequence[Path] = (),
    owner: tuple[int, int] | None = None,
    max_bytes: int | None = None,
) -> Unpacked:
    """Unpacks an uncompressed tar stream into the empty directory `target`.

    `below`: the directories of the layers under this one, from top to bottom; a directory that the archive does not
    list takes its mode from there, and a hard link may name a file there. `owner`: uid and gid of all files, or None
    for those of this process. `max_bytes`: of all files together; a few kilobytes can unpack to more than a disk holds.
    Raises ImageError for an archive that is damaged, too large or reaches out of the layer, OSError when the machine
    fails.
    """
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        worker = _Unpacker(root, below, owner, max_bytes)
        with tarfile.open(
            fileobj=stream, mode="r|", bufsize=_COPY, tarinfo=_Entry, encoding="utf-8", errors="surrogateescape"
        ) as tar:
            for member in tar:
                worker.add(member, tar)
                tar.members.clear()  # type: ignore[attr-defined]  # else it remembers every one
        worker.finish()
        return Unpacked(worker.size_bytes, worker.num_entries, tuple(worker.notes))
    except (tarfile.TarError, EOFError, ValueError, OverflowError, UnicodeError) as err:
        if isinstance(err, ImageError):
            raise
        raise ImageError(f"the archive is damaged: {type(err).__name__}: {' '.join(str(err).split())}") from err
    finally:
        os.close(root)


def safe_path(name: str) -> str:
    """`name` relative to the layer, "" for the layer itself. Raises ImageError for a path that leads out of it."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise ImageError(f"{_shown(name)} leads out of the image")
    if len(parts) > MAX_DEPTH:
        raise ImageError(f"{_shown(name)} lies {len(parts)} directories deep: at most {MAX_DEPTH}")
    return "/".join(parts)


def _shown(name: str) -> str:
    text = ascii(name)
    return text if len(text) <= 120 else text[:117] + "..."


@dataclass(slots=True)
class _Directory:
    mode: int = 0o755
    mtime_ns: int = 0
    xattrs: tuple[tuple[str, bytes], ...] = ()


class _Unpacker:
    """Paths are relative to `root`. A directory in `_directories` was made here, and is safe to go through."""

    def __init__(self, root: int, below: Sequence[Path], owner: tuple[int, int] | None, max_bytes: int | None) -> None:
        self.size_bytes = self.num_entries = 0
        self.notes: dict[str, None] = {}
        self._root, self._below, self._owner, self._max_bytes = root, below, owner, max_bytes
        self._opaque: set[str] = set()
        self._whiteouts: set[str] = set()
        self._directories: dict[str, _Directory] = {"": self._inherited("")}

    def add(self, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        path = safe_path(member.name)
        self.num_entries += 1
        parent, _, name = path.rpartition("/")
        try:
            if name.startswith(_WHITEOUT):
                self._delete(parent, name)
            elif member.isdir():
                self._add_directory(path, member)
            elif not path:
                raise ImageError("the root of the image is not a directory")
            elif member.isreg():
                self._add_file(path, member, tar)
            elif member.issym():
                self._make_room(path)
                os.symlink(member.linkname, path, dir_fd=self._root)
                self._finish_node(path, member)
            elif member.islnk():
                self._link(path, member)
            elif member.isfifo():
                self._make_room(path)
                os.mkfifo(path, 0o600, dir_fd=self._root)
                self._finish_node(path, member, mode=member.mode & 0o7777)
            else:
                kind = "device node" if member.isdev() else f"entry of type {member.type!r}"
                self.notes[f"skipped {kind} /{path}"] = None
        except FileExistsError as err:
            raise ImageError(f"{_shown(path)} is listed twice in one layer") from err
        except OSError as err:
            if err.errno in _BAD_NAMES:
                raise ImageError(f"{_shown(path)} cannot be made: {err.strerror}") from err
            raise

    # ---- whiteouts ------------------------------------------------------------------------------------------

    def _delete(self, parent: str, name: str) -> None:
        if name == _OPAQUE:
            self._enter(parent)
            self._opaque.add(parent)
            return
        if name.startswith(_WHITEOUT * 2):
            return  # bookkeeping of old storage drivers
        target = name.removeprefix(_WHITEOUT)
        if target in ("", ".", ".."):
            raise ImageError(f"{_shown(name)} deletes nothing that can be named")
        path = f"{parent}/{target}" if parent else target
        if path in self._directories:
            self._opaque.add(path)  # deleted below, and made anew by this layer
        elif not self._exists(path):
            self._whiteouts.add(path)

    def _make_room(self, path: str) -> None:
        """Before something is made at `path`: its directory is there, and it replaces what is below."""
        self._enter(path.rpartition("/")[0])
        self._whiteouts.discard(path)

    def _place_whiteouts(self) -> None:
        """Only where there is something to delete: elsewhere overlayfs would list a whiteout as a file."""
        for path in sorted(self._whiteouts):
            if not self._is_hidden(path) and lookup.find(self._below, path) is not None:
                self._enter(path.rpartition("/")[0])
                os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=self._root)

    def _is_hidden(self, path: str) -> bool:
        """Whether what lies at `path` below is hidden by an opaque directory of this layer."""
        return not self._opaque.isdisjoint([path, "", *(path[:at] for at, char in enumerate(path) if char == "/")])

    # ---- directories ----------------------------------------------------------------------------------------

    def _enter(self, path: str) -> None:
        """Makes sure that `path` and what it leads through are directories of this layer."""
        if path in self._directories:
            return
        self._enter(path.rpartition("/")[0])
        self._make_directory(path)
        self._directories[path] = self._inherited(path)

    def _make_directory(self, path: str) -> None:
        if path in self._whiteouts:
            self._whiteouts.remove(path)
            self._opaque.add(path)
        try:
            os.mkdir(path, 0o700, dir_fd=self._root)
        except FileExistsError as err:
            raise ImageError(f"{_shown(path)} is a link or a file of this layer, and others lie below it") from err

    def _inherited(self, path: str) -> _Directory:
        found = None if self._is_hidden(path) else lookup.find(self._below, path)
        if found is None or found.is_symlink() or not found.is_dir():
            return _Directory()
        info = found.stat()
        return _Directory(stat.S_IMODE(info.st_mode), info.st_mtime_ns)

    def _add_directory(self, path: str, member: tarfile.TarInfo) -> None:
        if path and path not in self._directories:
            self._enter(path.rpartition("/")[0])
            self._make_directory(path)
        self._directories[path] = _Directory(member.mode & 0o7777, _mtime_ns(member), self._xattrs(member, path))

    # ---- files ----------------------------------------------------------------------------------------------

    def _add_file(self, path: str, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        self._count_bytes(member.size)
        self._make_room(path)
        source: IO[bytes] | None = tar.extractfile(member)
        assert source is not None  # it is a regular file
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self._root)
        with open(fd, "wb") as file:
            shutil.copyfileobj(source, file, _COPY)
            file.flush()
            if file.tell() != member.size:
                raise ImageError(f"the archive ends within {_shown(path)}")
            self._finish_fd(fd, member.mode & 0o7777, _mtime_ns(member), self._xattrs(member, path))

    def _count_bytes(self, size: int) -> None:
        self.size_bytes += size
        if self._max_bytes is not None and self.size_bytes > self._max_bytes:
            raise ImageError(
                f"it unpacks to more than {self._max_bytes / 2**30:.1f} GiB, which is all there is room for"
            )

    def _link(self, path: str, member: tarfile.TarInfo) -> None:
        """Mode and time of the entry count for the file, as for every engine; archivers repeat those of the file."""
        target = safe_path(member.linkname)
        self._make_room(path)
        parent = target.rpartition("/")[0]
        if parent not in self._directories or not self._exists(target):
            self._copy_from_below(target)
        if target in self._directories:
            raise ImageError(f"{_shown(path)} is a hard link to a directory")
        os.link(target, path, src_dir_fd=self._root, dst_dir_fd=self._root, follow_symlinks=False)
        is_symlink = stat.S_ISLNK(os.lstat(path, dir_fd=self._root).st_mode)
        self._finish_node(path, member, mode=None if is_symlink else member.mode & 0o7777)

    def _copy_from_below(self, path: str) -> None:
        """A hard link to a file of a lower layer: that file becomes part of this layer, as overlayfs would do it."""
        found = lookup.find(self._below, path) if path not in self._whiteouts else None
        if found is None or not stat.S_ISREG(found.lstat().st_mode):
            raise ImageError(f"a hard link leads to {_shown(path)}, which is no file of the image")
        self._count_bytes(found.stat().st_size)
        self._make_room(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self._root)
        with open(found, "rb") as source, open(fd, "wb") as file:
            shutil.copyfileobj(source, file, _COPY)
            file.flush()
            info = found.stat()
            xattrs = tuple((name, os.getxattr(found, name)) for name in os.listxattr(found) if name.startswith("user."))
            self._finish_fd(fd, stat.S_IMODE(info.st_mode), info.st_mtime_ns, xattrs)

    def _exists(self, path: str) -> bool:
        try:
            os.lstat(path, dir_fd=self._root)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    # ---- attributes -----------------------------------------------------------------------------------------

    def _xattrs(self, member: tarfile.TarInfo, path: str) -> tuple[tuple[str, bytes], ...]:
        kept = []
        for key, text in member.pax_headers.items():
            if not key.startswith(_XATTR):
                continue
            name, value = key.removeprefix(_XATTR), text.encode("utf-8", "surrogateescape")
            if ".overlay." in name:
                raise ImageError(f"{_shown(path)} carries {name}, which would steer the overlay")
            if len(value) > _MAX_XATTR_BYTES:
                raise ImageError(f"{_shown(path)} has an attribute of {len(value)} bytes: at most {_MAX_XATTR_BYTES}")
            if name.startswith("user."):
                kept.append((name, value))
            else:
                self.notes[f"skipped attribute {name}"] = None
        return tuple(kept)

    def _finish_fd(self, fd: int, mode: int, mtime_ns: int, xattrs: Sequence[tuple[str, bytes]]) -> None:
        if self._owner is not None:
            os.fchown(fd, *self._owner)
        for name, value in xattrs:
            try:
                os.setxattr(fd, name, value)
            except OSError as err:
                self.notes[f"skipped attribute {name}: {err.strerror}"] = None
        os.fchmod(fd, mode)  # after the owner, whose change clears set-id bits
        os.utime(fd, ns=(mtime_ns, mtime_ns))

    def _finish_node(self, path: str, member: tarfile.TarInfo, *, mode: int | None = None) -> None:
        if self._owner is not None:
            os.chown(path, *self._owner, dir_fd=self._root, follow_symlinks=False)
        if mode is not None:
            os.chmod(path, mode, dir_fd=self._root)
        os.utime(path, ns=(_mtime_ns(member), _mtime_ns(member)), dir_fd=self._root, follow_symlinks=False)

    def finish(self) -> None:
        """Directories get their attributes last, the deepest first: their own may forbid to write into them."""
        self._place_whiteouts()
        for path in sorted(self._directories, key=lambda path: path.count("/") if path else -1, reverse=True):
            what = self._directories[path]
            fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._root)
            try:
                if path in self._opaque:
                    _mark_opaque(fd)
                mode = what.mode if path else 0o755  # of the top directory the sandbox's own counts
                self._finish_fd(fd, mode, what.mtime_ns, what.xattrs)
            finally:
                os.close(fd)


def _mark_opaque(fd: int) -> None:
    """Both marks where both are allowed: which one counts depends on who mounts."""
    done = 0
    for name in lookup.OPAQUE_XATTRS:
        try:
            os.setxattr(fd, name, b"y")
            done += 1
        except OSError:
            continue  # trusted ones are root's alone; older temporary file systems keep no user ones
    if not done:
        raise ImageError("this file system keeps no extended attributes: set SWE_RL_CACHE to another one")


def _mtime_ns(member: tarfile.TarInfo) -> int:
    text = str(member.pax_headers.get("mtime", member.mtime))
    whole, _, fraction = text.partition(".")
    return int(whole or 0) * 1_000_000_000 + int((fraction + "0" * 9)[:9] or 0)
