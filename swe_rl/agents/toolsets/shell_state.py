"""Directory and exported variables from one shell command to the next, without a shell that stays.

A shell that stays hangs on an open quote, dies by `exit` and loses its place after a time-out. Here each command has
its own: on exit it reports its state behind a marker at the end of its output, and the next one begins with it. A
command that cannot report (killed, `exec`, an exit trap of its own) leaves the state as it was.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from swe_rl.agents.toolset import Workspace
from swe_rl.types import ExecResult

_MAX_STATE = 3000  # characters; must fit into the tail that a sandbox keeps of an output. Beyond it only the directory


def with_state(workspace: Workspace, command: str, marker: str) -> str:
    """`command` in the state that the last one left, made to report its own behind `marker`. Adds no line before it."""
    report = (
        f's="$PWD\n$(export -p)"; [ ${{#s}} -le {_MAX_STATE} ] || s="$PWD"; '
        f"{{ printf '\\n%s\\n%s' {marker} \"$s\"; }} 2>/dev/null"
    )
    directory = f"cd {shlex.quote(workspace.cwd)} 2>/dev/null; " if workspace.cwd else ""
    exports = f"eval {_on_one_line(workspace.exports)}; " if workspace.exports else ""
    return f"{exports}{directory}trap {_on_one_line(report)} EXIT; {command}"


def keep_state(workspace: Workspace, result: ExecResult, marker: str) -> ExecResult:
    """Takes the report into the workspace; returns the result without it."""
    output, found, state = result.stdout.rpartition(b"\n" + marker.encode() + b"\n")
    if not found:
        return result
    directory, has_exports, exports = state.decode("utf-8", "surrogateescape").partition("\n")
    if directory.startswith("/"):
        workspace.cwd = directory
    if has_exports:
        workspace.exports = exports
    return replace(result, stdout=output)


def _on_one_line(code: str) -> str:
    """`code` as one word of bash without a line break, so that line numbers in error messages are the command's."""
    escaped = code.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"
