"""Does a task give its answer away? Looks for the gold patch in the base tree and in all that its sandbox can read.

A block is what the gold patch makes of a hunk. In the base tree the whole hunk with its context must not occur: code
repeats itself, seven lines of it rarely do. Everywhere else the changed lines with one neighbour each are enough. A
second copy of a changed module is a leak whatever it holds: beside the old version the correct one is a matter of luck.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unidiff import PatchSet
from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk

from swe_rl.errors import SandboxError
from swe_rl.protocols import Sandbox
from swe_rl.rewards import is_test_path
from swe_rl.types import Task

SCAN_S = 300.0
_SCRIPT = "/tmp/.scan.py"
_MIN_LETTERS = 12  # of a block, or it says nothing


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive lines of the repaired program."""

    name: str  # "PATH:LINE" in the repaired file
    lines: tuple[str, ...]  # without trailing blanks


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a scan of a sandbox found."""

    hits: tuple[tuple[str, str], ...] = ()  # (name of the block, where)
    copies: tuple[str, ...] = ()  # other copies of changed modules
    history: tuple[str, ...] = ()  # what repositories hold besides one commit
    files: int = 0  # read
    unread: int = field(default=0)  # without permission

    @property
    def reason(self) -> str:
        """One line, "" when nothing was found."""
        parts = [f"{name} stands in {where}" for name, where in self.hits[:2]]
        parts += [f"another copy: {path}" for path in self.copies[:2]]
        return "; ".join((*parts, *self.history[:2]))


def gold_blocks(task: Task, *, context: int) -> list[Block]:
    """The repaired lines of every hunk, runs of changes with `context` lines around them (at most what the hunk has).

    Hunks of test files are left out, and blocks too short to say anything. Raises nothing: a gold patch that is no text
    has no blocks.
    """
    try:
        patch = PatchSet(task.gold_patch.decode("utf-8", "surrogateescape"))
    except UnidiffParseError:
        return []
    found = []
    for file in patch:
        if not is_test_path(file.path.encode("utf-8", "surrogateescape")):
            for hunk in file:
                found += [Block(f"{file.path}:{line}", lines) for line, lines in _runs(hunk, context)]
    return [block for block in found if sum(c.isalnum() for c in "".join(block.lines)) >= _MIN_LETTERS]


def _runs(hunk: Hunk, context: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line number, lines of the repaired file) around each run of changes; a removal shows as its two neighbours."""
    after: list[str] = []
    touched: list[tuple[int, int]] = []  # places in `after`, half open
    for line in hunk:
        if line.line_type == "+":
            touched.append((len(after), len(after) + 1))
        if line.line_type == "-":
            touched.append((len(after), len(after)))
        if line.line_type in " +":
            after.append(line.value.rstrip())
    merged: list[tuple[int, int]] = []
    for first, last in sorted((max(a - context, 0), min(b + context, len(after))) for a, b in touched):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    for first, last in merged:
        lines = tuple(after[first:last])
        if any(lines):
            yield hunk.target_start + first, lines


def tree_leak(task: Task) -> str:
    """Where the base tree already has what the gold patch makes of it; "" when nowhere."""
    contents = {path: _lines(data) for path, data in task.tree.items()}
    for block in gold_blocks(task, context=3):
        for path, lines in contents.items():
            if _holds(lines, block.lines):
                return f"{block.name} stands in {path} of the base tree"
    return ""


def changed_modules(tasks: Iterable[Task]) -> list[str]:
    """Python files that gold patches change, below their source root: other files of these paths are copies."""
    found: set[str] = set()
    for task in tasks:
        for block in gold_blocks(task, context=1):
            path = block.name.rpartition(":")[0]
            if path.endswith(".py") and ("/" in path.removeprefix("src/").removeprefix("lib/")):
                found.add(path.removeprefix("src/").removeprefix("lib/"))
    return sorted(found)


async def scan_environment(sandbox: Sandbox, tasks: Sequence[Task], *, workdir: str) -> Findings:
    """Everything readable outside the workspace, for the gold patches of all `tasks` that share this environment."""
    blocks = {f"{task.task_id} {block.name}": block.lines for task in tasks for block in gold_blocks(task, context=1)}
    return await _scan(sandbox, blocks, copies=changed_modules(tasks), roots=["/"], excepted=[workdir])


async def scan_workspace(sandbox: Sandbox, task: Task) -> Findings:
    """The workspace with its repository, for this task's gold patch."""
    blocks = {block.name: block.lines for block in gold_blocks(task, context=3)}
    return await _scan(sandbox, blocks, copies=[], roots=[task.workdir], excepted=[])


async def _scan(
    sandbox: Sandbox,
    blocks: Mapping[str, tuple[str, ...]],
    *,
    copies: Sequence[str],
    roots: Sequence[str],
    excepted: Sequence[str],
) -> Findings:
    """Raises SandboxError when the sandbox cannot run the script or does not finish."""
    request = {
        "blocks": [[name, list(lines)] for name, lines in blocks.items()],
        "copies": list(copies),
        "roots": list(roots),
        "except": list(excepted),
    }
    await sandbox.write_file(_SCRIPT, _source())
    answer = "/tmp/.scan.json"
    command = f"python3 -I -S {shlex.quote(_SCRIPT)} >{answer}"
    result = await sandbox.exec(command, cwd="/", timeout_s=SCAN_S, stdin=json.dumps(request).encode())
    if result.exit_code != 0:
        tail = result.stderr[-200:].decode("utf-8", "replace").strip()
        raise SandboxError(f"the search for leaks did not finish: {result.outcome} {tail}")
    found = json.loads(await sandbox.read_file(answer))
    return Findings(
        hits=tuple((name, where) for name, where in found["hits"]),
        copies=tuple(found["copies"]),
        history=tuple(found["history"]),
        files=found["files"],
        unread=found["unread"],
    )


@functools.cache
def _source() -> bytes:
    return importlib.resources.files("swe_rl.curation.leaks_inside").joinpath("scan.py").read_bytes()


def _lines(data: bytes) -> list[str]:
    return [line.rstrip() for line in data.decode("utf-8", "surrogateescape").split("\n")]


def _holds(lines: Sequence[str], block: Sequence[str]) -> bool:
    starts = [place for place, line in enumerate(lines) if line == block[0]]
    return any(tuple(lines[start : start + len(block)]) == tuple(block) for start in starts)
