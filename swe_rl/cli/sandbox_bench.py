"""`swe-rl sandbox bench`: how fast sandboxes are here, alone or beside what others use."""

from __future__ import annotations

import asyncio
import csv
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swe_rl.errors import ConfigError
from swe_rl.types import SandboxSpec

if TYPE_CHECKING:
    from swe_rl.sandbox.docker.compare import Row


def add_parser(add: Callable[..., Any]) -> None:
    """Adds the subcommand."""
    bench = add("bench", help="time to start, run a command and close", example="swe-rl sandbox bench")
    bench.add_argument("--num", type=int, default=50, help="sandboxes to open (default 50)")
    bench.add_argument("--concurrency", type=int, default=16, help="at a time, in the throughput part (default 16)")
    bench.add_argument("--backend", choices=("local", "docker"), default="local", help="default local")
    bench.add_argument("--image", default="", help="of docker sandboxes, and of local ones if imported")
    bench.add_argument(
        "--compare", action="store_true", help="both backends, the docker command, its SDK and SWE-ReX, in one run"
    )
    bench.add_argument("--commands", type=int, default=20, help="per sandbox, with --compare (default 20)")
    bench.add_argument("--csv", metavar="FILE", help="append the rows to FILE")
    bench.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Prints a table, and with --csv writes its rows."""
    if arguments.num < 1 or arguments.concurrency < 1 or arguments.commands < 1:
        raise ConfigError("--num, --concurrency and --commands must be at least 1")
    if (arguments.compare or arguments.backend == "docker") and not arguments.image:
        raise ConfigError("--image is empty: name an image that the Docker Engine has")
    rows = _compare(arguments) if arguments.compare else _alone(arguments)
    if arguments.csv:
        _write(Path(arguments.csv), rows)
    return 0


def _alone(arguments: Namespace) -> list[dict[str, Any]]:
    from swe_rl.sandbox.bench import measure

    spec = SandboxSpec(backend=arguments.backend, image=arguments.image)
    result = asyncio.run(measure(spec, num=arguments.num, concurrency=arguments.concurrency))
    for name, value, unit in result.rows():
        print(f"{name:<18} {value:8.2f} {unit}")
    return [{"backend": arguments.backend, **{name: f"{value:.2f}" for name, value, _ in result.rows()}}]


def _compare(arguments: Namespace) -> list[dict[str, Any]]:
    from swe_rl.sandbox.docker.compare import compare

    rows = asyncio.run(compare(arguments.image, num=arguments.num, commands=arguments.commands))
    _print_rows(rows)
    return [
        {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in asdict(r).items()} for r in rows
    ]


def _print_rows(rows: Sequence[Row]) -> None:
    print(f"{'step':<8} {'system':<16} {'n':>5} {'p50 ms':>9} {'p95 ms':>9} {'x ours':>8}")
    for row in rows:
        line = (
            f"{row.step:<8} {row.system:<16} {row.num:>5} {row.p50_ms:>9.2f} {row.p95_ms:>9.2f} {row.times_ours:>8.2f}"
        )
        print(line)


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    is_new = not path.exists()
    place = {"date": date.today().isoformat(), "cores": os.cpu_count(), "load": f"{os.getloadavg()[0]:.1f}"}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*place, *rows[0]])
        if is_new:
            writer.writeheader()
        writer.writerows({**place, **row} for row in rows)
