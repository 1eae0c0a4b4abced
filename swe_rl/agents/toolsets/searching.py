"""Literal text search: in one file, or by file in a directory."""

from __future__ import annotations

import shlex

from swe_rl.agents.observation import ToolError, clean_text
from swe_rl.agents.toolset import Workspace
from swe_rl.agents.toolsets.viewing import file_lines

MAX_FILES = 100  # with matches, and matching lines of one file for `search_lines`: beyond it the term says too little


def check_term(term: str) -> None:
    """Raises ToolError for a term that cannot occur in a line."""
    if not term:
        raise ToolError("the search term is empty")
    if "\n" in term or "\0" in term:
        raise ToolError("the search term must be on one line")


def matching_lines(data: bytes, term: str) -> list[tuple[int, str]]:
    """(line number, line) of the lines that hold `term`."""
    return [(number, line) for number, line in enumerate(file_lines(data), 1) if term in line]


async def matches_by_file(workspace: Workspace, term: str, path: str, *, python_only: bool) -> dict[str, int] | None:
    """Path -> number of matching lines, hidden and binary files left out; None when `path` is a file.

    `path` is absolute. At most MAX_FILES + 1 files, sorted. Raises ToolError when there is no such path.
    """
    place, only = shlex.quote(path), "-name '*.py'" if python_only else ""
    command = (
        f"if [ -d {place} ]; then find {place} -mindepth 1 -name '.*' -prune -o -type f {only} "
        f"-exec grep -IcF -e {shlex.quote(term)} -- /dev/null {{}} + | grep -v ':0$' | LC_ALL=C sort | "
        f"head -n {MAX_FILES + 1}; elif [ -e {place} ]; then exit 10; else exit 11; fi"
    )
    result = await workspace.sandbox.exec(command)
    if result.exit_code == 10:
        return None
    if result.exit_code == 11:
        raise ToolError(f"there is no {path}")
    if result.outcome not in ("ok", "nonzero"):
        raise ToolError(f"the search was stopped ({result.outcome}): search a smaller directory")
    if result.stdout_bytes > len(result.stdout):
        raise ToolError("too many files match to list them: narrow the search by its term or its path")
    found = (line.rpartition(":") for line in clean_text(result.stdout).splitlines())
    return {name: int(count) for name, _, count in found if count.isdigit()}
