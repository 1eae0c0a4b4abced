"""SWE-Gym and its Lite part: rows of SWE-bench's shape with real lists and no image column."""

from __future__ import annotations

from swe_rl.tasks.sources import swebench
from swe_rl.tasks.sources.fields import Row
from swe_rl.tasks.sources.kept import keep_row
from swe_rl.types import Task

EXTRA = ("hints_text", "version", "environment_setup_commit")


def read(row: Row, *, source: str, split: str, keep_unknown: bool = False) -> Task:
    """One row as a task."""
    row.know((*EXTRA, *swebench.WRAPPING))
    for field in EXTRA:
        row.text(field, "")
    image = image_name(row.name("instance_id"))
    task = swebench.swebench_task(row, source=source, split=split, image=image)
    row.finish(keep_unknown=keep_unknown)
    return keep_row(task, row.values)


def image_name(instance_id: str) -> str:
    return f"xingyaoww/sweb.eval.x86_64.{instance_id.replace('__', '_s_').lower()}:latest"
