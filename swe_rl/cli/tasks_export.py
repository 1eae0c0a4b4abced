"""`swe-rl tasks export`: a task set as rows of SWE-bench's form, or as the rows that it was imported from."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from swe_rl.tasks.export import FORMS, export_tasks

EXAMPLE = "swe-rl tasks export --path tasks/verified --out verified.jsonl"


def add_command(commands: Any) -> None:
    """Adds the subcommand to those of `swe-rl tasks`."""
    parser = commands.add_parser(
        "export",
        help="write a task set as SWE-bench rows",
        description="Writes JSON lines. Form swebench has SWE-bench's columns, and beside them what they cannot hold, "
        "so that importing gives equal tasks; form source has the rows as they were imported.",
        example=EXAMPLE,
    )
    parser.add_argument("--path", type=Path, required=True, metavar="DIR", help="a task set")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="the file to write")
    parser.add_argument("--form", choices=FORMS, default="swebench", help="see above (default swebench)")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> int:
    count = export_tasks(arguments.path, arguments.out, form=arguments.form)
    print(f"{arguments.out}: {count} rows of form {arguments.form}")
    return 0
