"""`swe-rl tasks`: makes, converts, checks and describes task sets. Each subcommand is a module of its own."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Sequence

from swe_rl.cli.arguments import ArgumentParser

EXAMPLE = "swe-rl tasks import --source swebench_verified --out tasks/verified"
# Modules with add_command(commands), which sets `run` to a function Namespace -> exit code.
SUBCOMMANDS = ("tasks_build", "tasks_import", "tasks_export", "tasks_filter", "tasks_gate", "tasks_stats")


def main(argv: Sequence[str]) -> int:
    """Runs one subcommand and returns its exit code. Raises ConfigError for bad input."""
    arguments = _parser().parse_args(argv)
    run: Callable[[Namespace], int] = arguments.run
    return run(arguments)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="swe-rl tasks", description="Makes, converts, checks and describes task sets.", example=EXAMPLE
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in SUBCOMMANDS:
        importlib.import_module(f"swe_rl.cli.{name}").add_command(commands)
    return parser
