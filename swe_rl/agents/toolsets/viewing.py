"""Files and directories as text for the policy. Nothing is changed on the way: tabs, odd bytes' places and line numbers
are those of the file."""

from __future__ import annotations

import ast
import itertools
import shlex

from swe_rl.agents.edits import num_lines
from swe_rl.agents.observation import ToolError, clean_text
from swe_rl.agents.toolset import Workspace

MAX_CHARACTERS = 10_000  # of one view
MAX_ENTRIES = 500  # of a directory
CONDENSE_ABOVE = 110  # lines of a Python file beyond which function bodies are left out of a whole view
SNIPPET_CONTEXT = 4  # lines shown before and after an edit
_MIN_BODY, _MIN_DOCSTRING = 4, 5  # lines from which on they are left out


def file_lines(data: bytes) -> list[str]:
    """The lines without their line ends, as UTF-8 with invalid bytes replaced. Raises ToolError for a binary file."""
    if b"\0" in data[:8192]:
        raise ToolError("this is a binary file")
    lines = data.decode("utf-8", "replace").split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def numbered(lines: list[str], *, first: int) -> str:
    """Lines with their numbers, of which the first is `first`."""
    return "\n".join(f"{number:>6}\t{line}" for number, line in enumerate(lines, first))


def view_range(data: bytes, *, first: int, last: int) -> str:
    """Lines `first` to `last`, numbered; what lies outside of the file is left out."""
    lines = file_lines(data)
    first = max(first, 1)
    return numbered(lines[first - 1 : last], first=first)


def snippet(data: bytes, *, first: int, last: int) -> str:
    """The lines `first` to `last` of an edit and a few around them."""
    return view_range(data, first=first - SNIPPET_CONTEXT, last=last + SNIPPET_CONTEXT)


def condensed(data: bytes) -> str | None:
    """A Python file without the bodies of its functions and long docstrings of classes; None when it does not parse."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    lines, shown, number = file_lines(data), [], 1
    for start, end in sorted(_left_out(tree)):
        if start < number:
            continue  # inside of what is left out already
        shown += [numbered(lines[number - 1 : start - 1], first=number)] if start > number else []
        shown.append(f"       ... lines {start}-{end} left out ...")
        number = end + 1
    shown += [numbered(lines[number - 1 :], first=number)] if number <= len(lines) else []
    return "\n".join(shown)


def _left_out(tree: ast.Module) -> list[tuple[int, int]]:
    """First and last lines of what `condensed` leaves out."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start, end, least = node.body[0].lineno, node.body[-1].end_lineno or 0, _MIN_BODY
        elif isinstance(node, ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            start, end, least = node.body[0].lineno, node.body[0].end_lineno or 0, _MIN_DOCSTRING
        else:
            continue
        if end - start + 1 >= least and start > node.lineno:
            found.append((start, end))
    return found


def clip(text: str, *, advice: str) -> str:
    """`text` cut at MAX_CHARACTERS, with `advice` for what to do instead."""
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n... cut after {MAX_CHARACTERS} characters: {advice} ..."


def describe_size(data: bytes) -> str:
    """`1 line`, `12 lines`."""
    count = num_lines(data)
    return f"{count} line{'' if count == 1 else 's'}"


async def list_directory(workspace: Workspace, path: str, *, python_only: bool) -> str:
    """Two levels of a directory, without hidden entries, sorted; `python_only`: only directories and *.py files."""
    kinds = r"\( -type d -o -name '*.py' \)" if python_only else ""
    command = (
        f"find {shlex.quote(path)} -mindepth 1 -maxdepth 2 -name '.*' -prune -o {kinds} -print"
        f" | LC_ALL=C sort | head -n {MAX_ENTRIES + 1}"
    )
    result = await workspace.sandbox.exec(command)
    found = clean_text(result.stdout).splitlines()
    entries = list(itertools.takewhile(lambda entry: entry.startswith("/"), found))  # up to where the output was cut
    is_cut = len(entries) > MAX_ENTRIES or result.stdout_bytes > len(result.stdout)
    more = ["... there are more entries: view one of the directories ..."] if is_cut else []
    return "\n".join([path, *entries[:MAX_ENTRIES], *more])
