"""The oracle: turns a gold patch into the exact string replacements an agent could have made, and plays them.

Used for supervised warm starts on tasks that have no demonstrator of their own, and to prove that a task is solvable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from unidiff import PatchSet
from unidiff.patch import Hunk

from swe_rl.errors import ConfigError
from swe_rl.tasks.oracle_calls import Replacement, edit_call, look_call, submit_call
from swe_rl.types import Task, ToolCall

VIEW_CONTEXT = 6  # lines shown before and after the edited ones


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
            last = start + old.removesuffix("\n").count("\n")
            return Replacement(path=path, old=old, new=new, first_line=start, last_line=last)
        if before == 0 and after == len(body):
            raise ConfigError(
                f"task {task.task_id}: a hunk of the gold patch is not unique in {path}; give it more context"
            )
        before, after = max(before - 1, 0), min(after + 1, len(body))


class OracleDemonstrator:
    """Views each place of the gold patch, replaces it, submits. Same interface as minirepo's Demonstrator."""

    def __init__(self, task: Task, *, toolset: str = "minimal") -> None:
        """`toolset` is a name of agents.toolsets.TOOLSETS: whose tools the calls are written for."""
        self._calls = _script(task, toolset)

    def next_call(self, last_observation: str | None, test_passed: bool | None) -> ToolCall:
        """The next action; ignores what it sees. Raises StopIteration after `submit`."""
        return next(self._calls)


def _script(task: Task, toolset: str) -> Iterator[ToolCall]:
    added: Counter[str] = Counter()  # lines by which each file has grown
    for found in oracle_replacements(task):
        shift = added[found.path]
        edit = replace(found, first_line=found.first_line + shift, last_line=found.last_line + shift)
        added[found.path] += edit.new.count("\n") - edit.old.count("\n")
        num_lines = task.tree[edit.path].count(b"\n") + shift
        first, last = max(1, edit.first_line - VIEW_CONTEXT), edit.last_line + VIEW_CONTEXT
        # an editor refuses lines behind the end, sed does not mind
        yield look_call(toolset, edit.path, first, last if toolset in ("minimal", "bash") else min(last, num_lines))
        yield edit_call(toolset, edit)
    yield submit_call(toolset)
