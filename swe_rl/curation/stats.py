"""What a task set holds, by repository, difficulty, language and kind, and how large its patches and test lists are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swe_rl.curation.filters import difficulty
from swe_rl.tasks.sources.patch_paths import file_changes
from swe_rl.types import Task

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
GROUPS = ("source", "split", "kind", "language", "pass_rule", "difficulty", "repo")
SIZES = ("fail_to_pass", "pass_to_pass", "patch_lines", "patch_files", "issue_words")


@dataclass(slots=True)
class TaskStats:
    """Counts per group and the sizes of every task."""

    num_tasks: int = 0
    groups: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in GROUPS})
    sizes: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in SIZES})
    without_patch: int = 0
    without_test_command: int = 0  # tasks of the script runner that say no command
    images: int = 0  # distinct


def collect(tasks: Iterable[Task]) -> TaskStats:
    """Reads the tasks once; they need not fit into memory."""
    stats = TaskStats()
    images: set[str] = set()
    for task in tasks:
        changes = file_changes(task.gold_patch)
        stats.num_tasks += 1
        for name in GROUPS:
            stats.groups[name][difficulty(task) if name == "difficulty" else str(getattr(task, name))] += 1
        for name, size in (
            ("fail_to_pass", len(task.fail_to_pass)),
            ("pass_to_pass", len(task.pass_to_pass)),
            ("patch_lines", sum(change.added + change.removed for change in changes)),
            ("patch_files", len(changes)),
            ("issue_words", len(task.problem_statement.split())),
        ):
            stats.sizes[name].append(size)
        stats.without_patch += not task.gold_patch
        stats.without_test_command += task.test_runner == "script" and not task.test_cmd
        images |= {task.image} - {""}
    stats.images = len(images)
    return stats


def quantiles(values: Sequence[int]) -> list[int]:
    """The values at QUANTILES, each one that occurs (the lower one between two). Empty for no values."""
    ordered = sorted(values)
    return [ordered[int(q * (len(ordered) - 1))] for q in QUANTILES] if ordered else []
