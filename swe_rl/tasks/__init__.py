"""Tasks: `load_tasks` reads or generates them, `materialize` puts one on disk as a git repository."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import islice
from random import Random
from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.tasks import minirepo
from swe_rl.tasks.environment import task_spec
from swe_rl.tasks.patches import tree_diff
from swe_rl.tasks.repository import materialize, tree_commit
from swe_rl.tasks.store import read_tasks, write_tasks
from swe_rl.types import Task

__all__ = ["load_tasks", "materialize", "read_tasks", "task_spec", "tree_commit", "tree_diff", "write_tasks"]

_FIELDS = frozenset(field.name for field in fields(Task)) - {"meta", "tree", "hidden_files", "gold_patch"}
_SCAN_FACTOR = 200  # tasks of the endless source looked at per task asked for, before a filter counts as empty


def load_tasks(source: str, *, split: str, num_tasks: int, seed: int, **filters: Any) -> list[Task]:
    """`num_tasks` tasks of one split.

    source: "minirepo", or a directory written by `swe-rl tasks build`. num_tasks 0 takes all that a directory has
    (minirepo has no end). split "all" takes every split of a directory. filters: field of Task or key of Task.meta ->
    the value, or a list, tuple or set of values, to keep. A directory's tasks are shuffled by `seed` before the cut.
    Raises ConfigError for an unknown source, split or filter, and when no task is left.
    """
    if num_tasks < 0:
        raise ConfigError(f"num_tasks={num_tasks} is negative: use 0 for all, or a positive number")
    if source == "minirepo":
        if num_tasks == 0:
            raise ConfigError("task source minirepo has no end: ask for a number of tasks above 0")
        stream = islice(minirepo.generate(split=split, seed=seed), num_tasks * _SCAN_FACTOR)
        tasks = list(islice(_filtered(stream, filters), num_tasks))
    else:
        stored = [task for task in read_tasks(source) if split in (task.split, "all")]
        kept = list(_filtered(stored, filters))
        Random(f"tasks/{seed}").shuffle(kept)
        tasks = kept[:num_tasks] if num_tasks else kept
    if not tasks:
        raise ConfigError(f"no task left of {source!r}, split {split!r}, filters {filters}: choose others")
    return tasks


def _filtered(tasks: Iterable[Task], filters: dict[str, Any]) -> Iterator[Task]:
    many = (list, tuple, set, frozenset)
    wanted = {key: value if isinstance(value, many) else (value,) for key, value in filters.items()}
    for task in tasks:
        if all(_value(task, key) in values for key, values in wanted.items()):
            yield task


def _value(task: Task, key: str) -> Any:
    if key in _FIELDS:
        return getattr(task, key)
    if key in task.meta:
        return task.meta[key]
    raise ConfigError(f"task filter {key!r} is unknown here: use a field of Task or one of {sorted(task.meta)}")
