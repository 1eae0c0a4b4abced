"""Unified diffs between two trees, in the form that `git apply` takes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

_NO_NEWLINE = b"\n\\ No newline at end of file\n"


def tree_diff(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> bytes:
    """Patch that turns `old` (path -> content) into `new`; text files only. Empty when they agree."""
    return b"".join(
        _file_diff(path, old.get(path), new.get(path))
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
    )


def _file_diff(path: str, old: bytes | None, new: bytes | None) -> bytes:
    name = path.encode()
    header = [b"diff --git a/%s b/%s\n" % (name, name)]
    if old is None:
        header.append(b"new file mode 100644\n")
    if new is None:
        header.append(b"deleted file mode 100644\n")
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        _lines(old or b""),
        _lines(new or b""),
        fromfile=b"/dev/null" if old is None else b"a/" + name,
        tofile=b"/dev/null" if new is None else b"b/" + name,
    )
    return b"".join(header) + b"".join(line if line.endswith(b"\n") else line + _NO_NEWLINE for line in lines)


def _lines(content: bytes) -> list[bytes]:
    """Lines that end at \\n only: splitlines() would also cut at \\r, \\f and others, git does not."""
    lines = content.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
