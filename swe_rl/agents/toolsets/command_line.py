"""The command language of the nebius toolset, as text: `open FILE [LINE]`, `edit 3:5 <<EOF`, ... to tool calls.

What a shell would read is read like a shell: quotes, and here-documents for longer text. Anything else is a shell
command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from swe_rl.agents.observation import ToolError
from swe_rl.types import ToolCall

_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1[ \t]*$")
_RANGE = re.compile(r"(\d+):(\d+)")
USAGE = {
    "open": "open FILE [LINE]",
    "goto": "goto LINE",
    "scroll_down": "scroll_down",
    "scroll_up": "scroll_up",
    "search_file": "search_file TERM [FILE]",
    "create": "create FILE",
    "edit": "edit [--file FILE] FIRST:LAST [TEXT], or FIRST:LAST <<EOF with the text on the lines below and EOF last",
    "replace": "replace [--replace-all] SEARCH REPLACEMENT",
    "submit": "submit",
}


def parse_command(text: str) -> ToolCall | None:
    """The tool call that `text` writes; None for a shell command. Raises ToolError for a call with mistakes."""
    name = text.split(maxsplit=1)[0] if text.strip() else ""
    if name not in USAGE:
        return None
    text = text.strip()
    body = None
    if name == "edit":
        text, body = _heredoc(text)
    try:
        words = shlex.split(text)[1:]
    except ValueError as err:
        raise ToolError(f"{name}: {str(err).lower()}; write {USAGE[name]}") from err
    arguments = _READERS[name](words) if name != "edit" else _edit(words, body)
    return ToolCall(name=name, arguments=arguments)


def _heredoc(text: str) -> tuple[str, str | None]:
    """(command without it, text of the here-document or None). Raises ToolError when it has no end or text follows."""
    line, _, rest = text.partition("\n")
    found = _HEREDOC.search(line)
    if found is None:
        return text, None
    lines = rest.split("\n")
    if found[2] not in lines:
        raise ToolError(f"edit: the text does not end with a line {found[2]}; write {USAGE['edit']}")
    end = lines.index(found[2])
    if any(line.strip() for line in lines[end + 1 :]):
        raise ToolError(f"edit: one command at a time, but there is more after {found[2]}")
    return line[: found.start()], "".join(f"{line}\n" for line in lines[:end])


def _edit(words: list[str], body: str | None) -> dict[str, str]:
    arguments: dict[str, str] = {}
    if words[:1] == ["--file"]:
        _check("edit", len(words) >= 2)
        arguments["file"] = words[1]
        words = words[2:]
    _check("edit", 1 <= len(words) <= (1 if body is not None else 2))
    lines = _RANGE.fullmatch(words[0])
    _check("edit", lines is not None)
    assert lines is not None
    text = body if body is not None else "".join(words[1:])
    return {**arguments, "first": lines[1], "last": lines[2], "text": text}


def _replace(words: list[str]) -> dict[str, str]:
    everywhere = "--replace-all" in words
    words = [word for word in words if word != "--replace-all"] if everywhere else words
    _check("replace", len(words) == 2)
    return {"search": words[0], "replacement": words[1], **({"replace_all": "true"} if everywhere else {})}


def _reader(name: str, *keys: str, optional: str = "") -> Callable[[list[str]], dict[str, str]]:
    def read(words: list[str]) -> dict[str, str]:
        _check(name, len(keys) <= len(words) <= len(keys) + bool(optional))
        return dict(zip((*keys, optional), words, strict=False))

    return read


def _check(name: str, right: bool) -> None:
    if not right:
        raise ToolError(f"{name}: write {USAGE[name]}")


_READERS: dict[str, Callable[[list[str]], dict[str, str]]] = {
    "open": _reader("open", "file", optional="line"),
    "goto": _reader("goto", "line"),
    "scroll_down": _reader("scroll_down"),
    "scroll_up": _reader("scroll_up"),
    "search_file": _reader("search_file", "term", optional="file"),
    "create": _reader("create", "file"),
    "replace": _replace,
    "submit": _reader("submit"),
}
