"""One table over the jobs of a sweep: what differed, how it ended, what came out."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swe_rl.cli.sweep_jobs import Job
from swe_rl.metrics import METRICS_FILE, read_metrics

FIXED = ("job", "exit_code", "seconds")


def write_table(jobs: Sequence[Job], path: Path) -> list[dict[str, Any]]:
    """Writes one row per job and returns the rows. Columns: job, what was swept, exit_code, seconds, rollout/success of
    the last iteration, and PHASE/SPLIT/MODE with its standard error for every row of the job's final table."""
    rows = [row_of(job) for job in jobs]
    swept = list(dict.fromkeys(key for job in jobs for key in job.swept))
    results = list(dict.fromkeys(key for row in rows for key in row if key not in (*FIXED, *swept)))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["job", *swept, "exit_code", "seconds", *results])
        writer.writeheader()
        writer.writerows(rows)
    return rows


def row_of(job: Job) -> dict[str, Any]:
    """One job as columns by name."""
    row: dict[str, Any] = {"job": job.number, **job.swept, "exit_code": job.exit_code, "seconds": round(job.seconds, 1)}
    if (job.run_dir / METRICS_FILE).exists():
        for record in read_metrics(job.run_dir / METRICS_FILE):
            if "rollout/success" in record.values:
                row["rollout/success"] = record.values["rollout/success"]
    results = job.run_dir / "results.json"
    for result in json.loads(results.read_text()) if results.exists() else []:
        name = f"{result['phase']}/{result['split']}/{result['mode']}"
        row |= {name: result["success"], f"{name} stderr": result["stderr"]}
    return row


def metric_of(row: Mapping[str, Any], metric: str) -> float | None:
    """The column of that name; without a name the last result, else rollout/success. None when the row lacks it."""
    if metric:
        return row.get(metric)
    results = [key for key in row if key.count("/") == 2 and not key.endswith(" stderr") and key not in FIXED]
    return row[results[-1]] if results else row.get("rollout/success")


def print_table(rows: Sequence[Mapping[str, Any]], *, metric: str) -> None:
    """The table on standard error: numbers, settings, ending, and one result per job."""
    for row in rows:
        swept = " ".join(f"{key}={value}" for key, value in row.items() if key not in FIXED and "/" not in key)
        value = metric_of(row, metric)
        result = "-" if value is None else f"{value:.4f}"
        print(f"job {row['job']:>3}  exit {row['exit_code']}  {result:>8}  {swept}", file=sys.stderr)
