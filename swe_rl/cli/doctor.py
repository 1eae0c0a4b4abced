"""`swe-rl doctor`: what this machine has, what it lacks, and the cure for each. Exit code 0 if the laptop run works."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swe_rl.cli import doctor_parity, doctor_sandbox
from swe_rl.cli.arguments import ArgumentParser
from swe_rl.cli.doctor_checks import CHECKS, Check
from swe_rl.errors import ConfigError

STYLES = {"ok": "green", "missing": "red", "optional": "yellow"}


def main(argv: Sequence[str]) -> int:
    """Entry point of `swe-rl doctor`."""
    parser = ArgumentParser(
        prog="swe-rl doctor",
        description="Checks what this machine has for training, sandboxes and the optional backends.",
        example="swe-rl doctor; swe-rl doctor --parity experiment=smoke engine=vllm_cpu",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    parser.add_argument(
        "--parity",
        action="store_true",
        help="instead: whether trainer and engine of a configuration give the same tokens the same logprobs",
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of --parity, as for swe-rl train")
    arguments = parser.parse_args(argv)
    if arguments.parity:
        return doctor_parity.run(arguments.overrides)
    if arguments.overrides:
        raise ConfigError(f"{arguments.overrides[0]} means nothing to swe-rl doctor without --parity: add that")
    checks = [check() for check in (*CHECKS, *doctor_sandbox.checks())]
    if arguments.json:
        print(json.dumps([{**asdict(check), "status": check.status} for check in checks], indent=1))
    else:
        _print_table(checks)
    return 0 if all(check.ok or not check.required for check in checks) else 1


def _print_table(checks: Sequence[Check]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("part", "", "found", "cure"):
        table.add_column(title, overflow="fold")
    for check in checks:
        status = Text(check.status, style=STYLES[check.status])
        table.add_row(check.name, status, Text(check.found), Text("" if check.ok else check.cure))
    console.print(table)
    lacking = [check.name for check in checks if check.required and not check.ok]
    console.print(
        f"The laptop run needs: {', '.join(lacking)}" if lacking else "The laptop run works here: swe-rl train"
    )
