"""The patch that undoes a patch, text to text, as `git apply --reverse` would act. Form: git-diff(1)."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)", re.DOTALL)
_GIT = re.compile(rb"diff --git (a/.*|\"a/.*\") (b/.*|\"b/.*\")$")
_SWAPPED = {  # header lines that change into each other
    b"new file mode ": b"deleted file mode ",
    b"rename from ": b"rename to ",
    b"old mode ": b"new mode ",
}
_NO_NEWLINE = b"\\ No newline at end of file"


class NotReversible(ValueError):
    """A binary hunk without its reverse, a copy, or text that is no diff."""


def reverse_patch(patch: bytes) -> bytes:
    """Applying the result to the patched tree gives the tree before. Raises NotReversible."""
    lines = patch.split(b"\n")
    out: list[bytes] = []
    place = 0
    hunks = 0
    while place < len(lines):
        line = lines[place]
        if (hunk := _HUNK.match(line)) is not None:
            reversed_hunk, place = _reverse_hunk(hunk, lines, place)
            out += reversed_hunk
            hunks += 1
        elif line.startswith(b"--- ") and place + 1 < len(lines) and lines[place + 1].startswith(b"+++ "):
            out += [b"--- " + _other_side(lines[place + 1][4:], b"b/", b"a/")]
            out += [b"+++ " + _other_side(line[4:], b"a/", b"b/")]
            place += 2
        else:
            out.append(_header(line))
            hunks += line.startswith((b"new file mode", b"deleted file mode", b"rename from", b"old mode"))
            place += 1
    if not hunks:
        raise NotReversible("it changes nothing")
    return _in_order(out)


def _reverse_hunk(hunk: re.Match[bytes], lines: Sequence[bytes], place: int) -> tuple[list[bytes], int]:
    old_start, old_count, new_start, new_count, rest = hunk.groups()
    old_left, new_left = int(old_count or 1), int(new_count or 1)
    header = b"@@ -%s +%s @@%s" % (_span(new_start, new_count), _span(old_start, old_count), rest)
    body: list[bytes] = []
    place += 1
    removed: list[bytes] = []  # of the reverse: what the patch added
    added: list[bytes] = []
    last = b" "
    while old_left > 0 or new_left > 0 or (place < len(lines) and lines[place].startswith(_NO_NEWLINE)):
        if place >= len(lines):
            raise NotReversible("a hunk is shorter than its header says")
        line = lines[place]
        place += 1
        sign = line[:1] or b" "  # an empty context line that lost its blank
        if sign == b"\\":
            (body if last == b" " else removed if last == b"+" else added).append(line)
            continue
        if sign not in (b" ", b"+", b"-"):
            raise NotReversible(f"hunk line {line[:40]!r} begins with none of blank, + and -")
        old_left -= sign != b"+"
        new_left -= sign != b"-"
        if sign == b" ":
            body += removed + added + [line]
            removed, added = [], []
        else:
            (removed if sign == b"+" else added).append((b"-" if sign == b"+" else b"+") + line[1:])
        last = sign
    return [header, *body, *removed, *added], place


def _span(start: bytes, count: bytes | None) -> bytes:
    return start if count is None else start + b"," + count


def _other_side(path: bytes, prefix: bytes, new_prefix: bytes) -> bytes:
    if path.startswith(b'"' + prefix):
        return b'"' + new_prefix + path[1 + len(prefix) :]
    return new_prefix + path[len(prefix) :] if path.startswith(prefix) else path


def _header(line: bytes) -> bytes:
    if line.startswith((b"GIT binary patch", b"Binary files ")):
        raise NotReversible("a binary file")
    if line.startswith((b"copy from ", b"copy to ")):
        raise NotReversible("a copied file")
    if (git := _GIT.match(line)) is not None:
        return b"diff --git %s %s" % (_other_side(git[2], b"b/", b"a/"), _other_side(git[1], b"a/", b"b/"))
    for one, other in _SWAPPED.items():
        if line.startswith(one):
            return other + line[len(one) :]
        if line.startswith(other):
            return one + line[len(other) :]
    if (index := re.match(rb"index ([0-9a-f]+)\.\.([0-9a-f]+)(.*)", line, re.DOTALL)) is not None:
        return b"index %s..%s%s" % (index[2], index[1], index[3])
    return line


def _in_order(lines: list[bytes]) -> bytes:
    """git wants "old mode" before "new mode" and "rename from" before "rename to": swapping turned them round."""
    for place in range(len(lines) - 1):
        pair = lines[place], lines[place + 1]
        if pair[0].startswith(b"new mode ") and pair[1].startswith(b"old mode "):
            lines[place], lines[place + 1] = pair[1], pair[0]
        if pair[0].startswith(b"rename to ") and pair[1].startswith(b"rename from "):
            lines[place], lines[place + 1] = pair[1], pair[0]
    return b"\n".join(lines)
