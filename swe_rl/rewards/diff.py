"""A strict reader of Git diffs as bytes: which paths does each part touch?

`git apply` is lenient: it also takes parts without a `diff --git` line, in between others. A filter that understood
less than `git apply` could be walked around, so anything not read here line by line is refused as malformed.
(unidiff is text only and has no binary hunks, hence an own reader.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from swe_rl.errors import PatchError

_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_EXTENDED = (
    b"old mode ",
    b"new mode ",
    b"deleted file mode ",
    b"new file mode ",
    b"index ",
    b"similarity index ",
    b"dissimilarity index ",
    b"rename from ",
    b"rename to ",
    b"copy from ",
    b"copy to ",
)
_ESCAPES = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13, b'"': 34, b"\\": 92}


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePatch:
    """The part of a diff about one file. `data` is verbatim, `paths` are all names it reads or writes."""

    paths: tuple[bytes, ...]
    data: bytes
    is_new: bool
    is_moved: bool = False  # renamed or copied: the last path is new
    mode: bytes = b""  # of the file afterwards where the diff states it, such as b"120000" for a symbolic link


def split_patch(patch: bytes) -> list[FilePatch]:
    """Reads a whole diff. Raises PatchError(reason="malformed") at the first line it does not fully understand."""
    lines = patch.split(b"\n")
    if lines.pop() != b"":
        raise _malformed(len(lines), b"no newline at the end")
    parts, at = [], 0
    while at < len(lines):
        end, part = _read_file(lines, at)
        parts.append(part)
        at = end
    return parts


def _malformed(at: int, line: bytes) -> PatchError:
    return PatchError(f"malformed patch at line {at + 1}: {line[:60]!r}", reason="malformed")


def _read_file(lines: list[bytes], at: int) -> tuple[int, FilePatch]:
    start, mode, is_new, is_moved = at, b"", False, False
    names: list[bytes] = []
    if lines[at].startswith(b"diff --git "):
        names += _header_names(lines[at], at)
        at += 1
        while at < len(lines) and lines[at].startswith(_EXTENDED):
            key = next(k for k in _EXTENDED if lines[at].startswith(k))
            value = lines[at][len(key) :]
            if key.startswith((b"rename", b"copy")):
                names.append(_unquote(value, at))
                is_moved = True
            elif key in (b"new mode ", b"new file mode "):
                mode = value
            is_new = is_new or key == b"new file mode "
            at += 1
    elif not lines[at].startswith(b"--- ") or any(b" " in line[4:].split(b"\t")[0] for line in lines[at : at + 2]):
        raise _malformed(at, lines[at])  # without a Git header `git apply` cuts dates off names: no spaces then
    begin = at
    at = _read_body(lines, at, names)
    is_new = is_new or lines[begin : begin + 1] == [b"--- /dev/null"]  # a header of Git's own is not needed for that
    paths = tuple(dict.fromkeys(name for name in names if name != b"/dev/null"))
    if not paths or any(piece in (b"", b".", b"..") for path in paths for piece in path.split(b"/")):
        raise _malformed(start, lines[start])
    return at, FilePatch(
        paths=paths, data=b"\n".join(lines[start:at]) + b"\n", is_new=is_new, is_moved=is_moved, mode=mode
    )


def _read_body(lines: list[bytes], at: int, names: list[bytes]) -> int:
    """Hunks or a binary block after the headers; adds the names of ---/+++ lines. Returns the index after the part."""
    if at + 1 < len(lines) and lines[at].startswith(b"--- ") and lines[at + 1].startswith(b"+++ "):
        for line in lines[at : at + 2]:
            names.append(_strip_prefix(_unquote(line[4:].split(b"\t")[0], at), at))
        at += 2
        if at >= len(lines) or not lines[at].startswith(b"@@ "):
            raise _malformed(at, b"no hunk")
        while at < len(lines) and lines[at].startswith(b"@@ "):
            at = _skip_hunk(lines, at)
    elif at < len(lines) and lines[at] == b"GIT binary patch":
        at = _skip_binary(lines, at + 1)
    return at


def _skip_hunk(lines: list[bytes], at: int) -> int:
    match = _HUNK.match(lines[at])
    if match is None:
        raise _malformed(at, lines[at])
    old, new = (1 if count is None else int(count) for count in match.groups())
    at += 1
    while old > 0 or new > 0:
        sign = lines[at][:1] if at < len(lines) else b"end"
        if sign not in (b" ", b"-", b"+", b"\\", b""):
            raise _malformed(at, b"hunk cut short")
        old -= sign in (b" ", b"-", b"")  # an empty line is an empty context line, as for git apply
        new -= sign in (b" ", b"+", b"")
        at += 1
    if old < 0 or new < 0:
        raise _malformed(at - 1, lines[at - 1])
    return at + 1 if at < len(lines) and lines[at].startswith(b"\\ ") else at


def _skip_binary(lines: list[bytes], at: int) -> int:
    """One or two base85 blocks (forward, reverse), each `literal N` or `delta N`, its data, an empty line."""
    blocks = 0
    while at < len(lines) and re.fullmatch(rb"(literal|delta) \d+", lines[at]):
        at += 1
        while at < len(lines) and re.fullmatch(rb"[A-Za-z][0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]+", lines[at]):
            at += 1
        if at >= len(lines) or lines[at] != b"":
            raise _malformed(at, b"binary block cut short")
        at += 1
        blocks += 1
    if blocks not in (1, 2):
        raise _malformed(at, b"no binary block")
    return at


def _header_names(line: bytes, at: int) -> Iterator[bytes]:
    """Both names of a `diff --git` line; unquoted ones with spaces are split where the halves agree."""
    rest = line[len(b"diff --git ") :]
    if rest.startswith(b'"'):
        end = _quoted_end(rest, at)
        first, second = rest[:end], rest[end + 1 :]
    elif rest.endswith(b'"'):
        first, _, second = rest.partition(b' "')
        second = b'"' + second
    elif len(rest) % 2 == 1 and rest[: len(rest) // 2][2:] == rest[len(rest) // 2 + 1 :][2:]:
        first, second = rest[: len(rest) // 2], rest[len(rest) // 2 + 1 :]  # the same name twice, spaces or not
    else:
        first, found, second = rest.partition(b" b/")
        second = b"b/" + second
        if not found or b" b/" in second:
            raise _malformed(at, line)
    for name in (first, second):
        yield _strip_prefix(_unquote(name, at), at)


def _quoted_end(text: bytes, at: int) -> int:
    match = re.match(rb'"(?:[^"\\]|\\.)*"', text)
    if match is None:
        raise _malformed(at, text)
    return match.end()


def _strip_prefix(name: bytes, at: int) -> bytes:
    if name == b"/dev/null":
        return name
    _, found, path = name.partition(b"/")
    if not found:
        raise _malformed(at, name)
    return path


def _unquote(name: bytes, at: int) -> bytes:
    """Git's C-style quoting of unusual names."""
    if not name.startswith(b'"'):
        return name
    if _quoted_end(name, at) != len(name):
        raise _malformed(at, name)

    def replace(match: re.Match[bytes]) -> bytes:
        code = match.group(1)
        value = _ESCAPES.get(code, -1) if not code.isdigit() else int(code, 8)
        if not 0 <= value < 256:
            raise _malformed(at, name)
        return bytes([value])

    return re.sub(rb"\\([0-7]{3}|.)", replace, name[1:-1], flags=re.DOTALL)
