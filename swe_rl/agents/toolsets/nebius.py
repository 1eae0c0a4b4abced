"""The windowed tools of arXiv:2508.03501 (SWE-agent's first generation): a file is seen through a window of 100 lines.

Two ways to the same tools: structured calls, or the `bash` tool given the paper's command language, which is also what
any single-command action format produces. Directory and exported variables of shell commands are kept from one to the
next.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from swe_rl.agents.edits import num_lines, occurrence_lines, replace_all, replace_lines, replace_text
from swe_rl.agents.observation import ToolError, describe
from swe_rl.agents.toolset import Handler, OpenFile, Tool, Toolset, Workspace
from swe_rl.agents.toolsets import values
from swe_rl.agents.toolsets.command_line import USAGE, parse_command
from swe_rl.agents.toolsets.editor import syntax_error
from swe_rl.agents.toolsets.minimal import SUBMIT, submit
from swe_rl.agents.toolsets.searching import MAX_FILES, check_term, matching_lines
from swe_rl.agents.toolsets.shell import command_step, run_command
from swe_rl.agents.toolsets.shell_state import keep_state, with_state
from swe_rl.agents.toolsets.viewing import file_lines
from swe_rl.protocols import EnvStep

WINDOW, OVERLAP = 100, 2  # lines
SCROLLS = 3  # in a row, after which searching is recommended
_REVIEW = "Review the result, its indentation too; edit again if it is not right."


def prompt_line(workspace: Workspace) -> str:
    """The last line of every observation."""
    shown = workspace.open_file.path if workspace.open_file else "n/a"
    return f"(Current directory: {workspace.cwd or workspace.task.workdir}, current file: {shown}) bash-$"


async def _shell(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    command = arguments["command"]
    call = parse_command(command)
    if call is not None:
        return await _HANDLERS[call.name](workspace, call.arguments)
    result = await run_command(workspace, with_state(workspace, command, marker := secrets.token_hex(8)))
    shown = keep_state(workspace, result, marker)
    return command_step(shown, describe(shown))


async def _open(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    path = workspace.path(arguments["file"])
    try:
        data = await workspace.sandbox.read_file(path)
    except FileNotFoundError:
        raise ToolError(f"there is no {path}") from None
    except IsADirectoryError:
        raise ToolError(f"{path} is a directory: list it with ls") from None
    line = values.whole_number(arguments, "line") if arguments.get("line") else None
    _check_line(line, data)
    file = OpenFile(path)
    text = _window(file, data, line=line or 1)
    workspace.open_file = file
    return EnvStep(observation=text)


async def _goto(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    file, data = await _current(workspace)
    line = values.whole_number(arguments, "line")
    _check_line(line, data)
    return EnvStep(observation=_window(file, data, line=line))


async def _scroll_down(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    return await _scroll(workspace, WINDOW - OVERLAP)


async def _scroll_up(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    return await _scroll(workspace, OVERLAP - WINDOW)


async def _scroll(workspace: Workspace, lines: int) -> EnvStep:
    file, data = await _current(workspace)
    scrolls = file.scrolls + 1
    text = _window(file, data, first=file.first_line + lines)
    file.scrolls = scrolls
    if scrolls >= SCROLLS:
        text += f"\n{scrolls} scrolls in a row: search_file finds a place sooner, goto goes to a line."
    return EnvStep(observation=text)


async def _create(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    path = workspace.path(arguments["file"])
    try:
        await workspace.sandbox.read_file(path)
    except FileNotFoundError:
        await workspace.sandbox.write_file(path, b"\n")
    except IsADirectoryError:
        raise ToolError(f"{path} is a directory") from None
    else:
        raise ToolError(f"{path} exists already: open it")
    return await _open(workspace, {"file": path})


async def _edit(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    if arguments.get("file"):
        path = workspace.path(arguments["file"])
        data, file = await workspace.sandbox.read_file(path), OpenFile(path)
    else:
        file, data = await _current(workspace)
    first, last = values.whole_number(arguments, "first"), values.whole_number(arguments, "last")
    changed = replace_lines(data, first=first, last=last, text=arguments.get("text", ""))
    new_last = last + num_lines(changed) - num_lines(data)
    if file.path.endswith(".py") and (problem := syntax_error(changed)) and not syntax_error(data):
        raise ToolError(
            f"nothing was changed, because of a {problem}\nYour edit would have given\n"
            f"{_extract(changed, first, new_last)}\nThe file still reads\n{_extract(data, first, last)}"
        )
    text = _window(file, changed, line=first)
    await workspace.sandbox.write_file(file.path, changed)
    workspace.open_file = file
    return EnvStep(observation=f"{text}\nEdited. {_REVIEW}")


async def _replace(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    file, data = await _current(workspace)
    old, new = arguments["search"], arguments["replacement"]
    found = occurrence_lines(data, old)
    if not found:
        raise ToolError(f"the text does not occur in {file.path}")
    if values.switch(arguments, "replace_all", default=False):
        changed, done = replace_all(data, old=old, new=new), f"Replaced {len(found)} times."
    elif len(found) > 1:
        lines = ", ".join(str(line) for line in found[:20])
        raise ToolError(f"the text occurs {len(found)} times (lines {lines}): give more of it, or replace all")
    else:
        changed, done = replace_text(data, old=old, new=new), "Replaced."
    text = _window(file, changed, line=found[0])
    await workspace.sandbox.write_file(file.path, changed)
    return EnvStep(observation=f"{text}\n{done} {_REVIEW}")


async def _search_file(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    term = arguments["term"]
    check_term(term)
    if arguments.get("file"):
        path = workspace.path(arguments["file"])
        data = await workspace.sandbox.read_file(path)
    else:
        file, data = await _current(workspace)
        path = file.path
    found = matching_lines(data, term)
    if not found:
        return EnvStep(observation=f"no matches for {term!r} in {path}")
    if len(found) > MAX_FILES:
        raise ToolError(f"{len(found)} lines of {path} match {term!r}: narrow the search")
    lines = "\n".join(f"Line {number}: {line}" for number, line in found)
    return EnvStep(observation=f"{len(found)} matches for {term!r} in {path}:\n{lines}\nEnd of the matches")


async def _current(workspace: Workspace) -> tuple[OpenFile, bytes]:
    if workspace.open_file is None:
        raise ToolError("no file is open: open one first")
    return workspace.open_file, await workspace.sandbox.read_file(workspace.open_file.path)


def _check_line(line: int | None, data: bytes) -> None:
    if line is not None and not 1 <= line <= max(num_lines(data), 1):
        raise ToolError(f"line {line} is not in the file: it has {num_lines(data)} lines")


def _window(file: OpenFile, data: bytes, *, line: int = 0, first: int = 0) -> str:
    """The window that begins at `first`, or has `line` a sixth below its upper edge; moves the file's window there."""
    lines = file_lines(data)
    start = first or line - WINDOW // 6 + 1
    start = max(1, min(start, len(lines) - WINDOW + 1))
    file.first_line, file.scrolls = start, 0
    shown = lines[start - 1 : start - 1 + WINDOW]
    above, below = start - 1, len(lines) - (start - 1 + len(shown))
    return "\n".join(
        [
            f"[File: {file.path} ({len(lines)} lines total)]",
            *([f"({above} more lines above)"] if above else []),
            *(f"{number}:{text}" for number, text in enumerate(shown, start)),
            *([f"({below} more lines below)"] if below else []),
        ]
    )


def _extract(data: bytes, first: int, last: int) -> str:
    lines = file_lines(data)
    start = max(first - 5, 1)
    return "\n".join(f"{number}:{text}" for number, text in enumerate(lines[start - 1 : last + 5], start))


_FILE = {"file": "the file; without it the open one"}
_HANDLERS: dict[str, Handler] = {
    "open": _open,
    "goto": _goto,
    "scroll_down": _scroll_down,
    "scroll_up": _scroll_up,
    "search_file": _search_file,
    "create": _create,
    "edit": _edit,
    "replace": _replace,
    "submit": submit,
}


def _tool(
    name: str, description: str, parameters: Mapping[str, str] | None = None, optional: Mapping[str, str] | None = None
) -> Tool:
    return Tool(
        name=name,
        description=description,
        parameters=parameters or {},
        optional=optional or {},
        handler=_HANDLERS[name],
    )


NEBIUS = Toolset(
    (
        Tool(
            name="bash",
            description="Runs any shell command that is not interactive, or one of the commands below.",
            parameters={"command": "the command"},
            handler=_shell,
        ),
        _tool(
            "open",
            f"Opens a file and shows a window of {WINDOW} lines.",
            {"file": "the file"},
            {"line": "a line to show; without it the first"},
        ),
        _tool("goto", "Moves the window of the open file to a line.", {"line": "the line"}),
        _tool("scroll_down", "Moves the window down by its height."),
        _tool("scroll_up", "Moves the window up by its height."),
        _tool("search_file", "Lists the lines of a file that hold some text.", {"term": "the text"}, _FILE),
        _tool("create", "Creates a file and opens it.", {"file": "the new file"}),
        _tool(
            "edit",
            "Replaces lines of a file, the last one included; refused when Python would no longer parse.",
            {"first": "number of the first line", "last": "number of the last line"},
            {"text": "the lines to put there; without it they are deleted", **_FILE},
        ),
        _tool(
            "replace",
            "Replaces text in the open file; it must occur once.",
            {"search": "the text", "replacement": "what to put there"},
            {"replace_all": "true replaces every occurrence"},
        ),
        SUBMIT,
    ),
    footer=prompt_line,
    commands=USAGE,
)
