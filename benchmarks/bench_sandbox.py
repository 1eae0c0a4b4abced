"""Sandbox latency from a process that has imported torch, as the training process has: start, command, throughput.

    python benchmarks/bench_sandbox.py [--num 100] [--concurrency 16] [--write]

Compares with the rows of this CPU in baselines/sandbox.csv; --write appends a row. The targets are 15 ms to the first
use and 3 ms for a command at the median.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import platform
import resource
import subprocess
from datetime import date
from pathlib import Path

import torch

from swe_rl.sandbox.bench import SandboxBench, measure

BASELINES = Path(__file__).with_name("baselines") / "sandbox.csv"


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def row_of(result: SandboxBench) -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    place = {
        "date": date.today().isoformat(),
        "commit": commit,
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "user": "root" if os.geteuid() == 0 else "user",
        "owner_rss_mib": str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
    return place | {name: f"{value:.2f}" for name, value, _ in result.rows()}


def compare(row: dict[str, str]) -> None:
    if not BASELINES.exists():
        return
    with BASELINES.open(newline="") as file:
        old = [r for r in csv.DictReader(file) if all(r[k] == row[k] for k in ("cpu", "cores", "user"))]
    for name in ("first_use_ms_p50", "command_ms_p50", "per_second"):
        if old:
            print(f"{name}: {row[name]} now, {old[-1][name]} on {old[-1]['date']} ({old[-1]['commit']})")


def append(row: dict[str, str]) -> None:
    is_new = not BASELINES.exists()
    BASELINES.parent.mkdir(exist_ok=True)
    with BASELINES.open("a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--write", action="store_true", help="append a row to the baselines")
    arguments = parser.parse_args()
    ballast = torch.ones(256 << 20, dtype=torch.uint8)  # page tables that a fork would have to copy
    result = asyncio.run(measure(num=arguments.num, concurrency=arguments.concurrency))
    del ballast
    for name, value, unit in result.rows():
        print(f"{name:<18} {value:8.2f} {unit}")
    row = row_of(result)
    compare(row)
    if arguments.write:
        append(row)


if __name__ == "__main__":
    main()
