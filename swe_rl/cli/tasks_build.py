"""`swe-rl tasks build`: bug-fix tasks made from real packages."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Any

from swe_rl.cli.paths import cache_dir

EXAMPLE = "swe-rl tasks build --package toolz==1.2.0 --package boltons==26.2.0 --num-tasks 40 --out tasks/pypi"


def add_command(commands: Any) -> None:
    """Adds the subcommand to those of `swe-rl tasks`."""
    build = commands.add_parser(
        "build",
        help="inject bugs into real packages and keep those that tests catch",
        description="Downloads source distributions, injects bugs, and keeps each bug that 1 to 30 tests catch and its "
        "repair undoes. pip downloads from the configured index and runs the packages' build hooks; their tests run in "
        "sandboxes. The same packages and seed give the same tasks.",
        example=EXAMPLE,
    )
    build.add_argument("--package", action="append", required=True, metavar="NAME==VERSION", help="may be repeated")
    build.add_argument("--num-tasks", type=int, default=40, help="over all packages, spread evenly (default 40)")
    build.add_argument("--out", type=Path, required=True, metavar="DIR", help="written for task.source=DIR")
    build.add_argument("--seed", type=int, default=0, help="which bugs are tried, and the wording (default 0)")
    build.add_argument(
        "--test-requires", action="append", default=[], metavar="REQUIREMENT", help="what tests need besides pytest"
    )
    build.add_argument("--concurrency", type=int, default=2, help="bugs tried together (default 2)")
    build.set_defaults(run=_build)


def _build(arguments: Namespace) -> int:
    from swe_rl.curation.pypi import BuildOptions, build_tasks

    options = BuildOptions(
        num_tasks=arguments.num_tasks,
        seed=arguments.seed,
        test_requires=tuple(arguments.test_requires),
        concurrency=arguments.concurrency,
    )
    stats = asyncio.run(
        build_tasks(arguments.package, options=options, out=arguments.out, cache_dir=cache_dir(), report=_progress)
    )
    rejected = ", ".join(f"{reason} {count}" for reason, count in sorted(stats.rejected.items())) or "none"
    print(
        f"{len(stats.tasks)} tasks from {stats.candidates} candidates in {stats.seconds:.0f} s "
        f"({stats.seconds / max(stats.candidates, 1):.1f} s per candidate; rejected: {rejected})\n"
        f"{arguments.out}: use it with task.source={arguments.out}"
    )
    return 0


def _progress(line: str) -> None:
    print(line, flush=True)
