"""The row behind an imported task: what the task does not say itself is kept, so that the row can be written again.

meta["row"]        fields whose value differs from what `swebench_columns` derives from the task
meta["row_lacks"]  derived columns that the row did not have
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from swe_rl.types import Task

_ABSENT = object()


def swebench_columns(task: Task) -> dict[str, Any]:
    """The columns of SWE-bench that a task determines; lists as JSON text, as there."""
    return {
        "instance_id": task.task_id,
        "repo": task.repo,
        "base_commit": task.base_commit,
        "patch": task.gold_patch.decode("utf-8", "surrogatepass"),
        "test_patch": task.test_patch.decode("utf-8", "surrogatepass"),
        "problem_statement": task.problem_statement,
        "FAIL_TO_PASS": json.dumps(list(task.fail_to_pass)),
        "PASS_TO_PASS": json.dumps(list(task.pass_to_pass)),
        "created_at": task.created_at,
        "image": task.image,
        "eval_script": task.test_cmd,
        "log_parser": task.log_parser,
    }


def keep_row(task: Task, values: Mapping[str, Any], *, dropped: tuple[str, ...] = ()) -> Task:
    """`task` with the rest of its row in meta; the fields named in `dropped` are lost on purpose."""
    derived = swebench_columns(task)
    rest = {key: value for key, value in values.items() if key not in dropped and derived.get(key, _ABSENT) != value}
    lacks = sorted(set(derived) - set(values))
    return replace(task, meta={**task.meta, "row": rest, "row_lacks": lacks})


def source_row(task: Task) -> dict[str, Any] | None:
    """The row as it was imported, without the fields dropped then; None for a task that came from no row."""
    if "row" not in task.meta:
        return None
    derived = {key: value for key, value in swebench_columns(task).items() if key not in task.meta["row_lacks"]}
    return {**derived, **task.meta["row"]}
