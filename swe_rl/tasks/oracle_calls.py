"""The same scripted action as each toolset of agents/toolsets writes it: look, edit, run, hand in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swe_rl.types import ToolCall

# The test functions of every test file, one after the other, until one fails.
RUN_TESTS = (
    "for f in tests/test_*.py; do PYTHONPATH=. python3 -c 'import runpy, sys; [f() for n, f in "
    """runpy.run_path(sys.argv[1]).items() if n.startswith("test")]' $f || exit 1; done; echo passed"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """Whole lines of one file and what takes their place."""

    path: str
    old: str  # occurs exactly once in the file
    new: str
    first_line: int  # 1-based, of `old` in the file as it is before the edit
    last_line: int


def replacement_between(path: str, before: str, after: str) -> Replacement | None:
    """The lines that differ between two contents, with as few around them as make them unique; None when nothing does.

    Only an edit that leaves no text at all has no unique lines around it: then all of `before` is replaced.
    """
    if before == after:
        return None
    old, new = _lines(before), _lines(after)
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    tail = 0
    while tail < min(len(old), len(new)) - start and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    while True:
        text = "".join(old[start : len(old) - tail])
        if (text and before.count(text) == 1) or (start == 0 and tail == 0):
            break
        start, tail = max(start - 1, 0), max(tail - 1, 0)
    changed = "".join(new[start : len(new) - tail])
    return Replacement(path=path, old=text, new=changed, first_line=start + 1, last_line=len(old) - tail)


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def run_call(toolset: str, command: str) -> ToolCall:
    """A shell command."""
    name, key = ("execute_bash", "cmd") if toolset == "r2e" else ("bash", "command")
    return ToolCall(name=name, arguments={key: command})


def look_call(toolset: str, path: str, first: int, last: int) -> ToolCall:
    """Shows some lines of a file."""
    if toolset in _EDITORS and (path.endswith(".py") or toolset != "r2e"):
        lines = {"command": "view", "path": path, "view_range": f"[{first}, {last}]"}
        return ToolCall(name=_EDITORS[toolset], arguments=lines)
    if toolset == "nebius":
        return run_call(toolset, f"open {shlex.quote(path)} {first}")
    return run_call(toolset, f"sed -n {first},{last}p {shlex.quote(path)}")


def edit_call(toolset: str, edit: Replacement) -> ToolCall:
    """One replacement. Line numbers count in the file as it is then."""
    return _EDITS[toolset](edit)


def insert_call(toolset: str, path: str, *, after: int, text: str) -> ToolCall | None:
    """Whole lines put behind line `after` (0: at the top); None for tools without an editor that inserts."""
    if toolset not in _EDITORS:
        return None
    arguments = {"command": "insert", "path": path, "insert_line": str(after), "new_str": text}
    return ToolCall(name=_EDITORS[toolset], arguments=arguments)


def submit_call(toolset: str) -> ToolCall:
    """Hands in."""
    if toolset == "bash":
        return run_call(toolset, "echo COMPLETE_TASK_AND_SUBMIT")
    return ToolCall(name="finish" if toolset == "r2e" else "submit", arguments={})


def _by_text(edit: Replacement) -> ToolCall:
    return ToolCall(name="replace", arguments={"path": edit.path, "old": edit.old, "new": edit.new})


def _by_editor(toolset: str) -> Callable[[Replacement], ToolCall]:
    def call(edit: Replacement) -> ToolCall:
        arguments = {"command": "str_replace", "path": edit.path, "old_str": edit.old, "new_str": edit.new}
        return ToolCall(name=_EDITORS[toolset], arguments=arguments)

    return call


def _by_lines(edit: Replacement) -> ToolCall:
    where = f"edit --file {shlex.quote(edit.path)} {edit.first_line}:{edit.last_line}"
    return run_call("nebius", where + (f" {_heredoc(edit.new)}" if edit.new else ""))


def _by_shell(edit: Replacement) -> ToolCall:
    """Head, new lines, tail: plain shell tools, and what is not edited keeps its bytes."""
    path = shlex.quote(edit.path)
    middle = f"cat {_heredoc(edit.new)}\n" if edit.new else ""
    return run_call(
        "bash",
        f"{{ head -n {edit.first_line - 1} {path}\n{middle}tail -n +{edit.last_line + 1} {path}; }} > /tmp/edited"
        f" && cat /tmp/edited > {path}",
    )


def _heredoc(text: str) -> str:
    """A here-document with `text`, which ends with a newline then."""
    end = "EOF"
    while end in text.split("\n"):
        end += "_"
    return f"<<'{end}'\n{text.removesuffix(chr(10))}\n{end}"


_EDITORS: Mapping[str, str] = {"r2e": "file_editor", "sweagent": "str_replace_editor"}
_EDITS: Mapping[str, Callable[[Replacement], ToolCall]] = {
    "minimal": _by_text,
    "r2e": _by_editor("r2e"),
    "sweagent": _by_editor("sweagent"),
    "nebius": _by_lines,
    "bash": _by_shell,
}
