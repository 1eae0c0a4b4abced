"""Task sets back as rows of the field.

Form "swebench": families of SWE-bench's own shape give exactly the rows that they were; all others (a bug instead of a
patch, an expected map, hidden files) give SWE-bench's columns plus, under other names, what these cannot hold: the rows
of tasks/store.py, with tars beside the file where there are trees. Form "source": the imported rows, whatever their
shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.tasks.sources.kept import source_row
from swe_rl.tasks.store import iter_rows, iter_tasks, write_rows
from swe_rl.types import Task

FORMS = ("swebench", "source")
# Sources whose rows have SWE-bench's columns with SWE-bench's meaning.
SHAPED = (
    "swebench", "swebench_lite", "swebench_verified", "swebench_multilingual", "swe_gym", "swe_rebench",
    "swe_rebench_v2",
)  # fmt: skip


def export_tasks(path: str | Path, out: str | Path, *, form: str = "swebench") -> int:
    """Writes the rows of the task set `path` to the file `out` (JSON lines, there at once) and returns their number.

    Raises ConfigError when `out` is not a new .jsonl file, or a task came from no row (form "source").
    """
    if form not in FORMS:
        raise ConfigError(f"form={form!r} is unknown: use one of {', '.join(FORMS)}")
    target = Path(out)
    if target.suffix != ".jsonl" or target.exists():
        raise ConfigError(f"out={out} must be a new file that ends in .jsonl")
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = _rows(iter_tasks(path), target.parent, form)
    return write_rows((json.dumps(row, ensure_ascii=False) for row in rows), target)


def _rows(tasks: Iterator[Task], folder: Path, form: str) -> Iterator[Mapping[str, Any]]:
    for task in tasks:
        row = source_row(task) if form == "source" or task.source in SHAPED else None
        if row is not None:
            yield row
        elif form == "source":
            raise ConfigError(f"task {task.task_id} of {task.source} came from no row: use form swebench")
        else:
            yield from iter_rows([task], folder)
