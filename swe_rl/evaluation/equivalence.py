"""When two patches of one task are the same answer.

With the base tree at hand, patches are compared by what they make of it: Python files by their syntax tree (comments,
blank lines and layout do not count; docstrings do), other files by content. Without it, by the diff: hunks without line
numbers and without the context around them, files in order.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping

from swe_rl.errors import PatchError
from swe_rl.evaluation.apply_diff import apply_diff
from swe_rl.rewards.diff import split_patch

_NOISE = re.compile(rb"^(index [0-9a-f]+\.\.[0-9a-f]+.*|(dis)?similarity index .*)\n", re.MULTILINE)
_HUNK = re.compile(rb"^@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@.*$", re.MULTILINE)


def normal_patch(patch: bytes) -> bytes:
    """The diff with its files in order of name, without object names (binary parts keep theirs: they do not apply
    without); unchanged where it is not understood."""
    if not patch:
        return b""
    try:
        parts = split_patch(patch)
    except PatchError:
        return patch
    ordered = sorted(parts, key=lambda part: part.paths)
    return b"".join(
        part.data if b"\nGIT binary patch\n" in part.data else _NOISE.sub(b"", part.data) for part in ordered
    )


def patch_digest(patch: bytes, *, base: Mapping[str, bytes] | None = None) -> str:
    """Equal exactly for equivalent patches; "" for one that changes nothing. 16 hexadecimal digits.

    base: path -> content of the task's tree, or None where it lies in an image.
    """
    changed = apply_diff(base, patch) if base else None
    if changed is not None:
        assert base is not None
        meaning = {path: _meaning(path, data) for path, data in changed.items()}
        meaning = {path: value for path, value in meaning.items() if value != _meaning(path, base.get(path))}
        content = b"".join(
            b"%s\0%s\0" % (path.encode("utf-8", "surrogateescape"), meaning[path]) for path in sorted(meaning)
        )
    else:
        content = _bare(patch)
    return hashlib.sha256(content).hexdigest()[:16] if content else ""


def _meaning(path: str, data: bytes | None) -> bytes:
    """What a file says; b"" for none."""
    if data is None:
        return b""
    if path.endswith(".py"):
        try:
            return b"python " + ast.dump(ast.parse(data)).encode("utf-8", "surrogatepass")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass
    return b"bytes " + data


def _bare(patch: bytes) -> bytes:
    """Removed and added lines per file and hunk, without trailing blanks."""
    kept = [line.rstrip() for line in _HUNK.sub(b"@@", normal_patch(patch)).split(b"\n")]
    return b"\n".join(line for line in kept if line.startswith((b"+", b"-", b"@@", b"diff ", b"new ", b"deleted ")))
