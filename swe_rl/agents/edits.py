"""Edits of file content, pure functions on bytes: what is not edited keeps every byte (tabs, CRLF, a missing last
newline)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass

from swe_rl.agents.observation import ToolError

_BOM = b"\xef\xbb\xbf"


class EditError(ToolError):
    """The edit is not possible."""


def occurrence_lines(data: bytes, text: str) -> list[int]:
    """1-based lines on which `text` begins in `data`, without overlaps. Its newlines are read as `replace_text` does.

    Raises EditError when `text` is empty.
    """
    part = _text_like(data, text)
    if not part:
        raise EditError("the text to look for is empty")
    return [data.count(b"\n", 0, at) + 1 for at in _occurrences(data, part)]


def replace_all(data: bytes, *, old: str, new: str) -> bytes:
    """`data` with every occurrence of `old` replaced by `new`; newlines as in `replace_text`."""
    return data.replace(_text_like(data, old), _text_like(data, new))


def num_lines(data: bytes) -> int:
    """Lines of a file; a last line without a newline counts."""
    return data.count(b"\n") + (not data.endswith(b"\n") if data else 0)


def insert_lines(data: bytes, *, after: int, text: str) -> bytes:
    """`data` with `text` as whole lines after line `after` (0: at the top).

    A newline that `text` lacks is added; at the end of a file without a last newline that one stays missing instead.
    Raises EditError when there is no such line.
    """
    total = num_lines(data)
    if not 0 <= after <= total:
        raise EditError(f"line {after} is not in the file: it has {total} lines, and 0 is before the first")
    return _splice(data, first=after + 1, last=after, text=text)


def replace_lines(data: bytes, *, first: int, last: int, text: str) -> bytes:
    """`data` with the lines `first` to `last` (1-based, both included) replaced by `text`; empty text deletes them.

    `text` stands for whole lines, its last newline is treated as by `insert_lines`. Raises EditError for a range that
    the file does not have.
    """
    total = num_lines(data)
    if not 1 <= first <= last <= total:
        raise EditError(f"lines {first}:{last} are not in the file: it has {total} lines")
    return _splice(data, first=first, last=last, text=text)


def replace_text(data: bytes, *, old: str, new: str) -> bytes:
    """`data` with its only occurrence of `old` replaced by `new`.

    In a file whose lines all end in CRLF, plain newlines in `old` and `new` mean CRLF, so that the file stays CRLF.
    Raises EditError when `old` is empty, missing, found several times, or equal to `new`.
    """
    if not old:
        raise EditError("old is empty")
    if old == new:
        raise EditError("old and new are the same")
    old_bytes, new_bytes = _text_like(data, old), _text_like(data, new)
    count = data.count(old_bytes)
    if count == 0:
        raise EditError("old not found")
    if count > 1:
        lines = ", ".join(str(data.count(b"\n", 0, at) + 1) for at in _occurrences(data, old_bytes)[:5])
        raise EditError(f"old found {count} times (lines {lines})")
    return data.replace(old_bytes, new_bytes)


def replace_function(data: bytes, *, name: str, body: str) -> bytes:
    """`data` with the whole function `name` replaced by `body`, a complete `def` or `async def`.

    `name` is `f` or `Class.method`; a bare name that is no top-level function may be a method if only one has it.
    `body` is moved to the indentation of the function that it replaces (the inside of multi-line strings is not
    touched). Decorators: those of the old function stay, unless `body` brings its own; then these replace them. Raises
    EditError: no or several functions of that name, a file or a result that does not parse, a body that is not exactly
    one function of the same name.
    """
    bom, content = (_BOM, data[len(_BOM) :]) if data.startswith(_BOM) else (b"", data)
    target = _find_function(_parse_file(content, "file"), name)
    lines = content.splitlines(keepends=True)
    new = _parse_body(body, target.name)
    replaced = target.decorator_list if new.decorator_list else []
    first = min([target.lineno, *(decorator.lineno for decorator in replaced)])
    last = target.end_lineno or target.lineno
    indent = re.match(rb"[ \t\f]*", lines[target.lineno - 1]).group()  # type: ignore[union-attr]
    encoding = _encoding(content)
    text = _newlines_like(content, _reindent(body, indent.decode("ascii")))
    tail = lines[last - 1][len(lines[last - 1].rstrip(b"\r\n")) :]
    result = b"".join(lines[: first - 1]) + _encode(text, encoding) + tail + b"".join(lines[last:])
    _parse_file(result, "result")
    return bom + result


def function_lines(data: bytes, name: str) -> tuple[int, int]:
    """First and last line, 1-based, of the function that `replace_function` would replace, with its decorators.

    Raises EditError: no or several functions of that name, a file that does not parse.
    """
    target = _find_function(_parse_file(data.removeprefix(_BOM), "file"), name)
    first = min([target.lineno, *(decorator.lineno for decorator in target.decorator_list)])
    return first, target.end_lineno or target.lineno


Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class _Found:
    path: str  # "Class.method", "outer.inner"
    node: Function


def _find_function(tree: ast.Module, name: str) -> Function:
    functions = _functions(tree, "")
    found = [f for f in functions if f.path == name] or [f for f in functions if f.path.endswith("." + name)]
    if not found:
        raise EditError(f"no function {name}")
    if len(found) > 1:
        places = ", ".join(f"{f.path} line {f.node.lineno}" for f in found[:5])
        raise EditError(f"{len(found)} functions {name}: {places}")
    return found[0].node


def _functions(node: ast.AST, prefix: str) -> list[_Found]:
    found: list[_Found] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(_Found(prefix + child.name, child))
            found += _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            found += _functions(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):
            found += _functions(child, prefix)  # definitions under if, try, with
    return found


def _parse_body(body: str, name: str) -> Function:
    """The single function of `body`, which may be indented as a whole. Line numbers are those of the stripped body +
    1."""
    if not body.strip():
        raise EditError("body is empty")
    statements = _parse_shifted(body).body
    if len(statements) != 1 or not isinstance(statements[0], ast.FunctionDef | ast.AsyncFunctionDef):
        raise EditError(f"body must be one whole function: def {name}(...)")
    if statements[0].name != name:
        raise EditError(f"body defines {statements[0].name}, not {name}")
    return statements[0]


def _parse_shifted(body: str) -> ast.If | ast.Module:
    """Parses a body at any indentation. An indented body is wrapped in `if 1:` on one line before it."""
    text = _strip_blank_lines(body)
    indented = text[0] in " \t"
    try:
        tree = ast.parse(f"if 1:\n{text}\n" if indented else f"\n{text}\n")
    except (SyntaxError, ValueError) as err:
        raise EditError(_syntax_message("body", err, shift=1)) from err
    return tree.body[0] if indented else tree  # type: ignore[return-value]


def _reindent(body: str, indent: str) -> str:
    """`body` without blank lines around it, its first line at `indent`; lines inside multi-line strings stay as they
    are."""
    text = _strip_blank_lines(body)
    current = re.match(r"[ \t]*", text).group()  # type: ignore[union-attr]
    if current == indent:
        return text
    inside = _string_lines(_parse_shifted(body))
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if index + 2 not in inside and line.strip():
            lines[index] = indent + line.removeprefix(current)
    return "\n".join(lines)


def _string_lines(tree: ast.AST) -> set[int]:
    """Numbers of the lines that begin inside a string constant."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and (node.end_lineno or 0) > node.lineno:
            inside.update(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    return inside


def _strip_blank_lines(text: str) -> str:
    return re.sub(r"\A(?:[ \t]*\n)+", "", text.replace("\r\n", "\n")).rstrip()


def _parse_file(content: bytes, what: str) -> ast.Module:
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError) as err:
        raise EditError(_syntax_message(what, err, shift=0)) from err


def _syntax_message(what: str, err: SyntaxError | ValueError, *, shift: int) -> str:
    line = getattr(err, "lineno", None)
    place = f" line {max(line - shift, 1)}" if line else ""
    return f"syntax error in {what}{place}: {getattr(err, 'msg', None) or err}"


def _encoding(content: bytes) -> str:
    return tokenize.detect_encoding(io.BytesIO(content).readline)[0]


def _text_like(data: bytes, text: str) -> bytes:
    return _encode(_newlines_like(data, text), "utf-8")


def _splice(data: bytes, *, first: int, last: int, text: str) -> bytes:
    """Puts `text` where lines `first` to `last` are; `last` = `first` - 1 replaces nothing."""
    lines = re.findall(rb"[^\n]*\n|[^\n]+", data)
    before, after = lines[: first - 1], lines[last:]
    new, newline = _text_like(data, text), _text_like(data, "\n")
    if new and before and not before[-1].endswith(b"\n"):  # added behind a last line without a newline
        before[-1] += newline
    ends_open = not after and bool(data) and not data.endswith(b"\n")
    if ends_open:
        new = new.removesuffix(newline)
    elif new and not new.endswith(b"\n"):
        new += newline
    return b"".join(before) + new + b"".join(after)


def _newlines_like(data: bytes, text: str) -> str:
    """`text` with CRLF line ends if every line of `data` ends so."""
    crlf = data.count(b"\r\n")
    if crlf == 0 or crlf != data.count(b"\n"):
        return text
    return text.replace("\r\n", "\n").replace("\n", "\r\n")


def _encode(text: str, encoding: str) -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as err:
        raise EditError(f"the text has characters that the file's encoding ({encoding}) lacks") from err


def _occurrences(data: bytes, part: bytes) -> list[int]:
    places, at = [], data.find(part)
    while at >= 0:
        places.append(at)
        at = data.find(part, at + len(part))
    return places
