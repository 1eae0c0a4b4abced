"""`swe-rl tasks import`: any data set of the field as a task set."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.tasks.sources import SOURCES, TASK_SET, ImportReport, import_tasks
from swe_rl.tasks.store import write_tasks
from swe_rl.types import Task

EXAMPLE = "swe-rl tasks import --source r2e_gym --path r2e_gym_subset.parquet --out tasks/r2e"
_PROGRESS_EVERY = 5000  # rows
_SHOWN_REPOS = 10


def add_command(commands: Any) -> None:
    """Adds the subcommand to those of `swe-rl tasks`."""
    parser = commands.add_parser(
        "import",
        help="convert a data set of the field into a task set",
        description="Reads a data set row by row and writes a task set for task.source=DIR, with a report of what was "
        "skipped and why in DIR/import_report.json. Sources: "
        + ", ".join(SOURCES)
        + f", and {TASK_SET} for a set of ours or an exported file.",
        example=EXAMPLE,
    )
    parser.add_argument(
        "--source", required=True, choices=[*SOURCES, TASK_SET], metavar="NAME", help="the data set's family"
    )
    parser.add_argument("--path", default="", help="Parquet, JSON lines, JSON, a folder, or OWNER/NAME on the hub "
                        "(default: the family's own data set)")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="written for task.source=DIR")
    parser.add_argument("--split", default="train", help="of the tasks made (default train)")
    parser.add_argument("--hub-split", default=None, help="which files of a hub data set (default: the family's own)")
    parser.add_argument(
        "--keep-unknown", action="store_true", help="carry unknown fields along instead of refusing them"
    )
    parser.add_argument(
        "--skip-invalid", action="store_true", help="count malformed rows instead of stopping at the first"
    )
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> int:
    report = ImportReport()
    tasks = import_tasks(
        arguments.source,
        arguments.path,
        split=arguments.split,
        hub_split=arguments.hub_split,
        keep_unknown=arguments.keep_unknown,
        skip_invalid=arguments.skip_invalid,
        report=report,
    )
    if (arguments.out / "tasks.jsonl").exists():
        raise ConfigError(f"--out={arguments.out} has a task set already: choose another directory")
    first = next(tasks, None)
    if first is None:
        raise ConfigError(f"no task came of {arguments.path or arguments.source}: {summary(report)}")
    write_tasks(_with_progress(first, tasks, report), arguments.out)
    text = json.dumps(as_json(report), indent=1, ensure_ascii=False)
    (arguments.out / "import_report.json").write_text(text + "\n", encoding="utf-8", errors="replace")
    print(summary(report))
    print(f"{arguments.out}: use it with task.source={arguments.out}")
    return 0


def _with_progress(first: Task, rest: Iterator[Task], report: ImportReport) -> Iterator[Task]:
    yield first
    for task in rest:
        if report.tasks % _PROGRESS_EVERY == 0:
            print(f"{report.tasks} tasks from {report.rows} rows", flush=True)
        yield task


def summary(report: ImportReport) -> str:
    """The report as lines of text."""
    lines = [f"{report.tasks} tasks from {report.rows} rows of {len(report.repos)} repositories"]
    lines += [f"skipped {count}: {reason}" for reason, count in report.skipped.most_common()]
    if report.num_invalid:
        lines += [f"malformed {report.num_invalid}, such as {report.invalid[0]}"]
    for why, count in report.ungradable.most_common():
        lines += [f"not gradable here {count} ({why}): judged by statuses that their own harness gives only"]
    if report.dropped_fields:
        lines += [f"fields not kept: {', '.join(report.dropped_fields)}"]
    if len(report.repos) > 1:
        most = ", ".join(f"{repo} {count}" for repo, count in report.repos.most_common(_SHOWN_REPOS))
        lines += [f"most: {most}"]
    return "\n".join(lines)


def as_json(report: ImportReport) -> dict[str, Any]:
    """Everything in the report, for a file."""
    return {
        "rows": report.rows,
        "tasks": report.tasks,
        "skipped": dict(report.skipped.most_common()),
        "malformed": report.num_invalid,
        "malformed_first": report.invalid,
        "ungradable": dict(report.ungradable.most_common()),
        "repos": dict(report.repos.most_common()),
        "languages": dict(report.languages.most_common()),
        "fields_not_kept": list(report.dropped_fields),
    }
