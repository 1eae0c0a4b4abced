"""The file editor of the r2e and sweagent toolsets: view, create, str_replace, insert, undo_edit in one tool.

It reads and writes the sandbox's files as bytes and edits them here, so the image needs no Python and an edit changes
nothing but what it says.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from swe_rl.agents.edits import insert_lines, num_lines, occurrence_lines, replace_text
from swe_rl.agents.observation import ToolError
from swe_rl.agents.toolset import Tool, Workspace
from swe_rl.agents.toolsets import values
from swe_rl.agents.toolsets.viewing import (
    CONDENSE_ABOVE,
    clip,
    condensed,
    describe_size,
    list_directory,
    snippet,
    view_range,
)
from swe_rl.protocols import EnvStep

_ADVICE = "find line numbers with grep -n, then view with view_range"


@dataclass(frozen=True, slots=True, kw_only=True)
class EditorKind:
    """What differs between toolsets."""

    undo: bool  # has undo_edit
    for_python: bool  # shows Python files and directories only, long files condensed, and can check syntax

    @property
    def commands(self) -> tuple[str, ...]:
        return ("view", "create", "str_replace", "insert", *(["undo_edit"] if self.undo else []))


def make_editor(name: str, kind: EditorKind) -> Tool:
    """The tool."""
    optional = {
        "file_text": "create: the whole content of the new file",
        "old_str": "str_replace: the text to replace, which must occur exactly once, spaces and newlines included",
        "new_str": "str_replace: the text to put there (none: the old text is deleted); insert: the lines to insert",
        "insert_line": "insert: the number of the line after which to insert; 0 is before the first",
        "view_range": "view: first and last line like [11, 60]; -1 as the last is the end of the file",
    }
    if kind.for_python:
        optional |= {
            "concise": "view: true leaves out function bodies, false shows them; without it long files leave them out",
            "python_only": "view: false also shows files that are not Python",
            "enable_linting": "true refuses an edit after which a Python file has a syntax error that it had not",
        }
    return Tool(
        name=name,
        description="Views, creates and edits files. A directory is listed two levels deep.",
        parameters={"command": ", ".join(kind.commands), "path": "file or directory"},
        optional=optional,
        handler=partial(_edit, kind),
    )


async def _edit(kind: EditorKind, workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    command = arguments["command"].strip()
    if command not in kind.commands:
        raise ToolError(f"no command {command}; use {', '.join(kind.commands)}")
    path = workspace.path(arguments["path"])
    if command == "view":
        return EnvStep(observation=await _view(kind, workspace, path, arguments))
    return EnvStep(observation=await _CHANGES[command](workspace, path, arguments))


async def _view(kind: EditorKind, workspace: Workspace, path: str, arguments: Mapping[str, str]) -> str:
    python_only = values.switch(arguments, "python_only", default=True) if kind.for_python else False
    lines = values.line_range(arguments, "view_range")
    try:
        data = await workspace.sandbox.read_file(path)
    except IsADirectoryError:
        if lines:
            raise ToolError("view_range is for files; this is a directory") from None
        return clip(await list_directory(workspace, path, python_only=python_only), advice="view a directory in it")
    if python_only and not path.endswith(".py"):
        raise ToolError(f"{workspace.shown(path)} is no Python file: read it with the shell")
    if not data:
        return f"{workspace.shown(path)} is empty"
    if lines is None:
        long = kind.for_python and path.endswith(".py") and num_lines(data) > CONDENSE_ABOVE
        concise = values.switch(arguments, "concise", default=long) if kind.for_python else False
        text = (condensed(data) if concise and path.endswith(".py") else None) or view_range(
            data, first=1, last=num_lines(data)
        )
        return clip(text, advice=_ADVICE)
    first, last = _checked(lines, total=num_lines(data))
    return clip(view_range(data, first=first, last=last), advice=_ADVICE)


def _checked(lines: tuple[int, int], *, total: int) -> tuple[int, int]:
    first, last = lines[0], total if lines[1] == -1 else lines[1]
    if not 1 <= first <= total:
        raise ToolError(f"view_range begins at {first}, but the file has lines 1 to {total}")
    if not first <= last <= total:
        raise ToolError(f"view_range ends at {last}, which must be from {first} to {total}, or -1 for the end")
    return first, last


async def _create(workspace: Workspace, path: str, arguments: Mapping[str, str]) -> str:
    content = _needed(arguments, "file_text", "create").encode()
    try:
        await workspace.sandbox.read_file(path)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        raise ToolError(f"{workspace.shown(path)} is a directory") from None
    else:
        raise ToolError(f"{workspace.shown(path)} exists already: change it with str_replace or insert")
    _check_syntax(arguments, path, before=b"", after=content)
    await workspace.sandbox.write_file(path, content)
    workspace.undo.setdefault(path, []).append(None)
    return f"created {workspace.shown(path)} ({describe_size(content)})"


async def _str_replace(workspace: Workspace, path: str, arguments: Mapping[str, str]) -> str:
    old, new = _needed(arguments, "old_str", "str_replace"), arguments.get("new_str", "")
    data = await workspace.sandbox.read_file(path)
    found = occurrence_lines(data, old)
    if not found:
        raise ToolError(f"no occurrences of old_str in {workspace.shown(path)}; it must match exactly, spaces included")
    if len(found) > 1:
        lines = ", ".join(str(line) for line in found[:20])
        raise ToolError(f"multiple occurrences of old_str in {workspace.shown(path)} (lines {lines}): make it unique")
    last = found[0] + new.rstrip("\n").count("\n")
    return await _store(
        workspace, path, arguments, data, replace_text(data, old=old, new=new), first=found[0], last=last
    )


async def _insert(workspace: Workspace, path: str, arguments: Mapping[str, str]) -> str:
    _needed(arguments, "insert_line", "insert")
    text, after = _needed(arguments, "new_str", "insert") or "\n", values.whole_number(arguments, "insert_line")
    data = await workspace.sandbox.read_file(path)
    changed = insert_lines(data, after=after, text=text)
    last = after + text.removesuffix("\n").count("\n") + 1
    return await _store(workspace, path, arguments, data, changed, first=after + 1, last=last)


async def _undo(workspace: Workspace, path: str, arguments: Mapping[str, str]) -> str:
    earlier = workspace.undo.get(path)
    if not earlier:
        raise ToolError(f"no edit of {workspace.shown(path)} to take back")
    content = earlier.pop()
    if content is None:
        await workspace.sandbox.exec(f"rm -f -- {shlex.quote(path)}")
        return f"removed {workspace.shown(path)}, which was created here"
    await workspace.sandbox.write_file(path, content)
    return f"took back the last edit of {workspace.shown(path)} ({describe_size(content)})"


async def _store(
    workspace: Workspace, path: str, arguments: Mapping[str, str], before: bytes, after: bytes, *, first: int, last: int
) -> str:
    """Writes an edit, remembers what was there, and shows lines `first` to `last` of the result."""
    _check_syntax(arguments, path, before=before, after=after)
    shown = snippet(after, first=first, last=last)
    await workspace.sandbox.write_file(path, after)
    workspace.undo.setdefault(path, []).append(before)
    return f"edited {workspace.shown(path)}, which now reads\n{shown}"


def _check_syntax(arguments: Mapping[str, str], path: str, *, before: bytes, after: bytes) -> None:
    if not path.endswith(".py") or not values.switch(arguments, "enable_linting", default=False):
        return
    if (problem := syntax_error(after)) and not syntax_error(before):
        raise ToolError(f"nothing was changed, because the file would have a {problem}")


def syntax_error(data: bytes) -> str:
    """`syntax error in line 3: ...` for content that is no Python of the version that runs this, else ""."""
    try:
        ast.parse(data)
    except SyntaxError as err:
        return f"syntax error in line {err.lineno}: {err.msg}"
    except (ValueError, RecursionError, MemoryError) as err:
        return f"syntax error: {err or 'nested too deeply'}"
    return ""


def _needed(arguments: Mapping[str, str], key: str, command: str) -> str:
    if key not in arguments:
        raise ToolError(f"{command} needs {key}")
    return arguments[key]


_CHANGES: dict[str, Callable[[Workspace, str, Mapping[str, str]], Awaitable[str]]] = {
    "create": _create,
    "str_replace": _str_replace,
    "insert": _insert,
    "undo_edit": _undo,
}
