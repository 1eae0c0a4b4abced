"""What benchmarks write beside their figures, the same way in each: rows of a CSV file, machine and commit, columns of
times, and the peak memory of one provider in a process of its own."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import Times

Row = dict[str, object]


def append_row(path: Path, columns: Sequence[str], row: Mapping[str, object]) -> None:
    """Appends and flushes; a new file gets its header first."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def circumstances(device: str, threads: int) -> Row:
    """When, which commit, on what, and how busy it was."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "threads": threads,
        "load_1m": round(os.getloadavg()[0], 1),  # our own threads count 1 each
    }


def cpu_name() -> str:
    """As the kernel names the first processor."""
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return lines[0].split(":", 1)[1].strip() if lines else platform.machine()


@functools.cache
def commit() -> str:
    """Of this checkout, abbreviated; "unknown" outside of one."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def time_columns(times: Times, ours: Times | None) -> Row:
    """Seconds, and the median over repetitions of the ratio to `ours`."""
    p20, p50, p80 = (times.quantile(share) for share in (0.2, 0.5, 0.8))
    return {
        "repeats": len(times.wall),
        "p20_s": f"{p20:.5g}",
        "p50_s": f"{p50:.5g}",
        "p80_s": f"{p80:.5g}",
        "cpu_p50_s": f"{statistics.median(times.cpu):.5g}",
        "ratio_to_ours": "" if ours is None else f"{times.median_ratio_to(ours):.3f}",
        "cpu_ratio_to_ours": "" if ours is None else f"{times.median_ratio_to(ours, cpu=True):.3f}",
    }


def memory_in_child(script: str, case: Any, provider: str, threads: int) -> Row:
    """`script --memory-of SPEC` in a fresh process, where large blocks go back to the system when they are freed. The
    script answers with print_memory; `case` is a dataclass."""
    spec = json.dumps({"case": dataclasses.asdict(case), "provider": provider, "threads": threads})
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, script, "--memory-of", spec], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"note": f"memory not measured: {reason}"}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def print_memory(spec: str, case_type: Callable[..., Any], memory_of: Callable[[Any, str], Row]) -> None:
    """The child's side of memory_in_child: memory_of(case, provider) as the last line of output."""
    found = json.loads(spec)
    torch.set_num_threads(found["threads"])
    print(json.dumps(memory_of(case_type(**found["case"]), found["provider"])))
