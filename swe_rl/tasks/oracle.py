"""The oracle: turns a gold patch into the exact string replacements an agent could have made, and plays them.

Used for supervised warm starts on tasks that have no demonstrator of their own, and to prove that a task is solvable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unidiff import PatchSet
from unidiff.patch import Hunk

from swe_rl.errors import ConfigError
from swe_rl.types import Task, ToolCall

VIEW_CONTEXT = 6  # lines shown before and after the edited ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    path: str
    old: str  # occurs exactly once in the file
    new: str
    first_line: int  # 1-based, of `old` in the base file
    last_line: int


def oracle_replacements(task: Task) -> list[Replacement]:
    """Exact replacements equivalent to `task.gold_patch`, in patch order.

    `old` is the changed lines plus as few lines of context as make it unique. Raises ConfigError for a patch that
    creates, deletes or renames files, or that does not fit `task.tree`.
    """
    found: list[Replacement] = []
    for file in PatchSet(task.gold_patch.decode()):
        if not file.is_modified_file or file.path not in task.tree:
            raise ConfigError(
                f"task {task.task_id}: the gold patch is no plain edit of {file.path}; the oracle cannot play it"
            )
        lines = task.tree[file.path].decode().splitlines(keepends=True)
        found.extend(_replacement(task, file.path, lines, hunk) for hunk in file)
    return found


def _replacement(task: Task, path: str, lines: list[str], hunk: Hunk) -> Replacement:
    body = [line for line in hunk if line.line_type in " -+"]
    changed = [i for i, line in enumerate(body) if line.line_type != " "]
    before, after = changed[0], changed[-1] + 1
    text = "".join(lines)
    first = hunk.source_start
    while True:
        window = body[before:after]
        old = "".join(line.value for line in window if line.line_type != "+")
        new = "".join(line.value for line in window if line.line_type != "-")
        start = first + sum(line.line_type != "+" for line in body[:before])
        if old and text.count(old) == 1:
            return Replacement(path=path, old=old, new=new, first_line=start, last_line=start + old.count("\n") - 1)
        if before == 0 and after == len(body):
            raise ConfigError(
                f"task {task.task_id}: a hunk of the gold patch is not unique in {path}; give it more context"
            )
        before, after = max(before - 1, 0), min(after + 1, len(body))


class OracleDemonstrator:
    """Views each place of the gold patch, replaces it, submits. Same interface as minirepo's Demonstrator."""

    def __init__(self, task: Task) -> None:
        self._calls = _script(task)

    def next_call(self, last_observation: str | None, test_passed: bool | None) -> ToolCall:
        """The next action; ignores what it sees. Raises StopIteration after `submit`."""
        return next(self._calls)


def _script(task: Task) -> Iterator[ToolCall]:
    for edit in oracle_replacements(task):
        first, last = max(1, edit.first_line - VIEW_CONTEXT), edit.last_line + VIEW_CONTEXT
        yield ToolCall(name="bash", arguments={"command": f"sed -n {first},{last}p {edit.path}"})
        yield ToolCall(name="replace", arguments={"path": edit.path, "old": edit.old, "new": edit.new})
    yield ToolCall(name="submit", arguments={})
