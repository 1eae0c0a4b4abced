"""Applies an exact diff to a tree in memory: what a patch makes of files, without Git and without a sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping

from swe_rl.errors import PatchError
from swe_rl.rewards.diff import FilePatch, split_patch

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def apply_diff(base: Mapping[str, bytes], patch: bytes) -> dict[str, bytes | None] | None:
    """Content of every file that `patch` touches, None for a deleted one.

    None when the patch does not fit `base` line by line (no searching at other places, as `git apply` does), moves
    files, or holds binary parts.
    """
    try:
        parts = split_patch(patch) if patch else []
    except PatchError:
        return None
    changed: dict[str, bytes | None] = {}
    for part in parts:
        path = part.paths[-1].decode("utf-8", "surrogateescape")
        if part.is_moved or path in changed or b"\nGIT binary patch\n" in part.data:
            return None
        after = _apply(base.get(path), part)
        if after is None:
            return None
        changed[path] = None if b"\ndeleted file mode " in part.data else after
    return changed


def _apply(before: bytes | None, part: FilePatch) -> bytes | None:
    """The file afterwards; None when a hunk does not fit."""
    if (before is None) != part.is_new:
        return None
    source = _lines(before or b"")
    result: list[bytes] = []
    at = 0
    lines = part.data.split(b"\n")[:-1]
    index = next((i for i, line in enumerate(lines) if line.startswith(b"@@ ")), len(lines))
    while index < len(lines):
        match = _HUNK.match(lines[index])
        if match is None:
            return None
        start, old, new = (int(match.group(i)) if match.group(i) is not None else 1 for i in (1, 2, 3))
        begin = start - 1 if old else start  # a hunk that removes nothing counts from the line before it
        if begin < at or begin > len(source):
            return None
        result += source[at:begin]
        at = begin
        index += 1
        while old > 0 or new > 0:
            sign, text = lines[index][:1] or b" ", lines[index][1:]
            bare = index + 1 < len(lines) and lines[index + 1].startswith(b"\\")
            line = text if bare else text + b"\n"
            index += 1 + bare
            if sign != b"+":
                if at >= len(source) or source[at] != line:
                    return None
                at += 1
                old -= 1
            if sign != b"-":
                result.append(line)
                new -= 1
    return b"".join(result + source[at:])


def _lines(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
