"""What a unified diff touches, read from its headers: enough for rows whose patches git itself need not see."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NOT_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")  # SWE-bench's
_HUNK = re.compile(rb"@@ -(?:\d+)(?:,(\d+))? \+(?:\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file of a diff. A path is None on the side where the file does not exist."""

    old_path: str | None
    new_path: str | None
    added: int  # lines
    removed: int

    @property
    def path(self) -> str:
        return self.new_path or self.old_path or ""


def file_changes(patch: bytes) -> list[FileChange]:
    """The files of a diff in its order, with their changed lines. Text that is no diff gives none."""
    return [_change(block) for block in _blocks(patch)]


def hidden_test_files(patch: bytes) -> tuple[str, ...]:
    """The files that a test patch leaves behind and that hold tests, as SWE-bench picks them."""
    paths = [change.new_path for change in file_changes(patch)]
    return tuple(path for path in paths if path is not None and not path.endswith(NOT_TESTS))


def _blocks(patch: bytes) -> Iterator[list[bytes]]:
    """The lines of each file's part. Hunks are measured, so that a removed line '-- a/x' is no header."""
    block: list[bytes] = []
    old_left = new_left = 0
    for line in patch.split(b"\n"):
        if old_left > 0 or new_left > 0:
            old_left -= line[:1] in (b" ", b"-", b"")
            new_left -= line[:1] in (b" ", b"+", b"")
            block.append(line)
            continue
        begins = line.startswith(b"diff --git ") or (line.startswith(b"--- ") and _has_hunk(block))
        if begins and block:
            yield block
            block = []
        if (hunk := _HUNK.match(line)) is not None:
            old_left, new_left = (int(count) if count is not None else 1 for count in hunk.groups())
        if begins or block or line.startswith(b"--- "):
            block.append(line)
    if block:
        yield block


def _has_hunk(block: list[bytes]) -> bool:
    return any(_HUNK.match(line) for line in block)


def _change(block: list[bytes]) -> FileChange:
    old, new = _git_paths(block[0])
    added = removed = old_left = new_left = 0
    for line in block:
        if old_left > 0 or new_left > 0:
            added += line[:1] == b"+"
            removed += line[:1] == b"-"
            old_left -= line[:1] in (b" ", b"-", b"")
            new_left -= line[:1] in (b" ", b"+", b"")
        elif (hunk := _HUNK.match(line)) is not None:
            old_left, new_left = (int(count) if count is not None else 1 for count in hunk.groups())
        elif line.startswith(b"--- "):
            old = _path(line[4:], b"a/")
        elif line.startswith(b"+++ "):
            new = _path(line[4:], b"b/")
        elif line.startswith(b"new file mode"):
            old = None
        elif line.startswith(b"deleted file mode"):
            new = None
        elif line.startswith(b"rename from "):
            old = _path(line[12:], b"")
        elif line.startswith(b"rename to "):
            new = _path(line[10:], b"")
    return FileChange(old, new, added, removed)


def _git_paths(line: bytes) -> tuple[str | None, str | None]:
    """Both paths of "diff --git a/x b/x": equal unless the file is renamed, which further headers tell."""
    if not line.startswith(b"diff --git "):
        return None, None
    rest = line[11:].rstrip(b"\r")
    half = (len(rest) - 1) // 2
    old, new = rest[:half], rest[half + 1 :]
    return _path(old, b"a/"), _path(new, b"b/")


def _path(raw: bytes, prefix: bytes) -> str | None:
    name = raw.rstrip(b"\r").split(b"\t")[0]
    if name == b"/dev/null":
        return None
    if name.startswith(b'"') and name.endswith(b'"') and len(name) >= 2:
        name = _unquoted(name[1:-1])
    return name.removeprefix(prefix).decode("utf-8", "surrogateescape")


_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b'"': b'"', b"\\": b"\\", b"a": b"\a", b"b": b"\b", b"f": b"\f"}


def _unquoted(name: bytes) -> bytes:
    """git's C-style quoting of a path, undone: \\303\\244 is one byte each."""
    return re.sub(
        rb"\\([0-7]{3}|.)",
        lambda m: bytes([int(m[1], 8) & 255]) if len(m[1]) == 3 else _ESCAPES.get(m[1], m[1]),
        name,
    )
