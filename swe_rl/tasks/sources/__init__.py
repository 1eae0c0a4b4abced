"""Data sets of the field as tasks. `import_tasks` streams; each family is one small module.

A reader gets a typed row and returns a Task; it raises RowError for a row that is not of its family (missing, malformed
or unknown field) and SkipRow for one that is, but gives no task. The row's other fields travel in Task.meta
(sources/kept.py), so that `export` can write the row again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from swe_rl.errors import ConfigError
from swe_rl.tasks.sources import (
    harbor,
    multi_swe_bench,
    nemo_gym,
    r2e_gym,
    swe_gym,
    swe_rebench,
    swe_smith,
    swebench,
    swebench_pro,
)
from swe_rl.tasks.sources.fields import Row, RowError, SkipRow
from swe_rl.tasks.sources.reading import Located, read_rows
from swe_rl.tasks.store import iter_tasks
from swe_rl.tasks.test_logs import why_ungradable
from swe_rl.types import Task

TASK_SET = "task_set"  # our own form: what `swe-rl tasks build` wrote (pypi), or an exported file

__all__ = ["SOURCES", "TASK_SET", "Family", "ImportReport", "Row", "RowError", "SkipRow", "import_tasks"]

_SHOWN_ERRORS = 20  # messages of malformed rows that a report keeps


@dataclass(frozen=True, slots=True)
class Family:
    """How one source is read, and where the hub has it."""

    read: Callable[..., Task]
    hub: str = ""  # data set of the hub, taken when no path is given
    hub_split: str = ""
    dropped: tuple[str, ...] = ()  # fields of a row that are not kept


SOURCES: dict[str, Family] = {
    "swebench": Family(swebench.read, "SWE-bench/SWE-bench", "test"),
    "swebench_lite": Family(swebench.read, "SWE-bench/SWE-bench_Lite", "test"),
    "swebench_verified": Family(swebench.read, "SWE-bench/SWE-bench_Verified", "test"),
    "swebench_multilingual": Family(swebench.read, "SWE-bench/SWE-bench_Multilingual", "test"),
    "swe_gym": Family(swe_gym.read, "SWE-Gym/SWE-Gym", "train"),
    "swe_rebench": Family(swe_rebench.read, "nebius/SWE-rebench", "filtered"),
    "swe_rebench_v2": Family(swe_rebench.read_v2, "nebius/SWE-rebench-V2", "train"),
    "swe_smith": Family(swe_smith.read, "SWE-bench/SWE-smith", "train"),
    "r2e_gym": Family(r2e_gym.read, "R2E-Gym/R2E-Gym-Subset", "train", r2e_gym.DROPPED),
    "swebench_pro": Family(swebench_pro.read, "ScaleAI/SWE-bench_Pro", "test"),
    "multi_swe_bench": Family(multi_swe_bench.read, "ByteDance-Seed/Multi-SWE-bench"),
    "nemo_gym": Family(nemo_gym.read),
    "harbor": Family(harbor.read),
}


@dataclass(slots=True)
class ImportReport:
    """What became of the rows. `skipped` counts by reason; `invalid` has the complaint about each malformed row."""

    rows: int = 0
    tasks: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    invalid: list[str] = field(default_factory=list)  # the first 20
    num_invalid: int = 0
    ungradable: Counter[str] = field(default_factory=Counter)  # by reason: a given map of statuses can judge them only
    repos: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    dropped_fields: tuple[str, ...] = ()

    def took(self, task: Task) -> None:
        self.tasks += 1
        self.repos[task.repo] += 1
        self.languages[task.language or "unknown"] += 1
        if why := why_ungradable(task):
            self.ungradable[why] += 1

    def complain(self, error: RowError) -> None:
        self.num_invalid += 1
        if len(self.invalid) < _SHOWN_ERRORS:
            self.invalid.append(str(error))


def import_tasks(
    source: str,
    path: str = "",
    *,
    split: str = "train",
    hub_split: str | None = None,
    keep_unknown: bool = False,
    skip_invalid: bool = False,
    report: ImportReport | None = None,
) -> Iterator[Task]:
    """The tasks of `path`, one at a time; `report` is filled on the way.

    source: a key of SOURCES, or "task_set" for a set of ours or an exported file, whose tasks stay as they are.
    path: a file, folder or hub data set; the family's own one by default. split: of the tasks made. keep_unknown:
    fields that the family does not know are carried along instead of refused. skip_invalid: a malformed row is counted
    instead of raised. Raises ConfigError (RowError for rows).
    """
    report = report if report is not None else ImportReport()
    if source == TASK_SET:
        return _unrepeated(_counted(iter_tasks(path), report), report)
    family = SOURCES.get(source)
    if family is None:
        raise ConfigError(f"task source {source!r} is unknown: use one of {', '.join(SOURCES)} or {TASK_SET}")
    if not path and not family.hub:
        raise ConfigError(f"source {source} has no published data set: give --path")
    report.dropped_fields = family.dropped
    rows = _located(source, path or family.hub, family.hub_split if hub_split is None and not path else hub_split or "")
    made = _converted(rows, family, source, split, keep_unknown, skip_invalid, report)
    return _unrepeated(made, report)


def _counted(tasks: Iterable[Task], report: ImportReport) -> Iterator[Task]:
    for task in tasks:
        report.rows += 1
        yield task


def _unrepeated(tasks: Iterable[Task], report: ImportReport) -> Iterator[Task]:
    """The tasks whose id did not come before, as the report counts them."""
    seen: set[str] = set()
    for task in tasks:
        if task.task_id in seen:
            report.skipped["task id seen before"] += 1
            continue
        seen.add(task.task_id)
        report.took(task)
        yield task


def _located(source: str, path: str, hub_split: str) -> Iterable[Located]:
    folder = Path(path)
    if source == "harbor":
        if not folder.is_dir():
            raise ConfigError(f"{path} is no folder: Harbor tasks are folders with a task.toml")
        return harbor.folder_rows(folder)
    if folder.is_dir() and source.startswith("swebench") and swebench.has_task_folders(folder):
        return swebench.folder_rows(folder)
    return read_rows(path, hub_split=hub_split)


def _converted(
    rows: Iterable[Located],
    family: Family,
    source: str,
    split: str,
    keep_unknown: bool,
    skip_invalid: bool,
    report: ImportReport,
) -> Iterator[Task]:
    for where, values in rows:
        report.rows += 1
        try:
            yield family.read(Row(values, where=where), source=source, split=split, keep_unknown=keep_unknown)
        except SkipRow as reason:
            report.skipped[str(reason)] += 1
        except RowError as error:
            if not skip_invalid:
                raise
            report.complain(error)
