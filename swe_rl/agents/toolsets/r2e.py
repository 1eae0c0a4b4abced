"""The four tools of R2E-Gym, with which DeepSWE was trained: file_editor, execute_bash, search, finish.

Every observation is headed by `Execution output of [TOOL]:`, that of a command by its exit code as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swe_rl.agents.observation import ToolError
from swe_rl.agents.toolset import Handler, Tool, Toolset, Workspace
from swe_rl.agents.toolsets import values
from swe_rl.agents.toolsets.editor import EditorKind, make_editor
from swe_rl.agents.toolsets.minimal import submit
from swe_rl.agents.toolsets.searching import MAX_FILES, check_term, matches_by_file, matching_lines
from swe_rl.agents.toolsets.shell import command_step, cut_lines, refuse, run_command, sections
from swe_rl.agents.toolsets.viewing import clip
from swe_rl.protocols import EnvStep

# The tool that DeepSWE was trained with takes `cmd`; a later version takes `command` and refuses other programs.
REFUSED = {
    "cmd": ("git", "ipython", "jupyter", "nohup"),
    "command": ("cd", "ipython", "jupyter", "pip", "nohup"),
}


def _headed(name: str, handler: Handler) -> Handler:
    """`handler` with the head line that this scaffold puts above everything, mistakes included."""

    async def headed(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
        try:
            step = await handler(workspace, arguments)
        except ToolError as err:
            step = EnvStep(observation=f"error: {err}")
        except OSError as err:
            step = EnvStep(observation=f"error: {err.strerror or err}")
        return replace(step, observation=f"Execution output of [{name}]:\n{step.observation}")

    return headed


async def _execute_bash(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    given = [key for key in REFUSED if key in arguments]
    if len(given) != 1:
        raise ToolError("execute_bash needs cmd")
    command = arguments[given[0]]
    try:
        refuse(
            command, REFUSED[given[0]], why="every command runs in a new shell in the repository, without a terminal"
        )
        result = await run_command(workspace, command)
    except ToolError as err:
        return EnvStep(observation=f"Exit code: -1\nExecution output of [execute_bash]:\nerror: {err}")
    code, text = str(result.exit_code), cut_lines(sections(result))
    if result.outcome == "timeout":
        code = "-1"
        text += f"\nThe command took too long: it was killed after {result.duration_s:.0f} s"
    elif result.outcome not in ("ok", "nonzero"):
        text += f"\nThe command was stopped: {result.outcome}"
    elif result.exit_code:
        code = f"Error: Exit code {result.exit_code}"
        text = f"The command failed\n{text}"
    return command_step(result, f"Exit code: {code}\nExecution output of [execute_bash]:\n{text}")


async def _search(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    term, path = arguments["search_term"], workspace.path(arguments.get("path", "."))
    check_term(term)
    python_only = values.switch(arguments, "python_only", default=True)
    files = await matches_by_file(workspace, term, path, python_only=python_only)
    if files is None:
        return EnvStep(observation=await _search_file(workspace, term, path))
    if not files:
        return EnvStep(observation=f"no matches for {term!r} in {path}")
    if len(files) > MAX_FILES:
        raise ToolError(f"more than {MAX_FILES} files match {term!r}: narrow the search by its term or its path")
    lines = [f"{name} ({count} match{'' if count == 1 else 'es'})" for name, count in files.items()]
    return EnvStep(observation="\n".join([f"{sum(files.values())} matches for {term!r} in {path}:", *lines]))


async def _search_file(workspace: Workspace, term: str, path: str) -> str:
    found = matching_lines(await workspace.sandbox.read_file(path), term)
    if not found:
        return f"no matches for {term!r} in {path}"
    text = "\n".join(f"{number}:{line}" for number, line in found)
    return clip(f"matches for {term!r} in {path}:\n{text}", advice="search for something longer")


FILE_EDITOR = make_editor("file_editor", EditorKind(undo=True, for_python=True))

R2E = Toolset(
    (
        replace(FILE_EDITOR, handler=_headed("file_editor", FILE_EDITOR.handler)),
        Tool(
            name="execute_bash",
            description="Runs a shell command in the repository, in a new shell, without input, under a time limit.",
            parameters={},
            optional={
                "cmd": "the command; it must not start with git, ipython, jupyter or nohup",
                "command": "another name of cmd, for which cd and pip are refused as well and git is not",
            },
            handler=_execute_bash,
        ),
        Tool(
            name="search",
            description="Looks for text, as it is, in a file (lines) or below a directory (files with their counts).",
            parameters={"search_term": "the text, on one line"},
            optional={
                "path": "file or directory; without it the repository",
                "python_only": "false also searches files that are not Python, of a directory",
            },
            handler=_headed("search", _search),
        ),
        Tool(
            name="finish",
            description="Ends the work and hands in the repository as it is.",
            parameters={},
            optional={"command": "submit", "result": "what was done; nobody reads it"},
            handler=submit,
        ),
    ),
    synonyms={"submit": "finish"},
)
