"""`swe-rl eval show RUN`: the table of an evaluation again, or what there is of one that was interrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from swe_rl.cli.arguments import ArgumentParser
from swe_rl.cli.eval_table import final_table
from swe_rl.errors import ConfigError
from swe_rl.evaluation.candidates import FILE_NAME, by_task, read_candidates
from swe_rl.evaluation.statistics import clustered_mean


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code. Raises ConfigError for bad input."""
    parser = ArgumentParser(
        prog="swe-rl eval show", description="Prints the table of an evaluation.", example="swe-rl eval show runs/RUN"
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    run: Path = parser.parse_args(argv).run
    file = run / "results.json"
    if not file.is_file():
        print(_unfinished(run))
        return 0
    rows = json.loads(file.read_text(encoding="utf-8"))
    if not rows or any("interval" not in row for row in rows):
        raise ConfigError(f"{file} is not of `swe-rl eval`: for a training run, use swe-rl report {run}")
    print(final_table(rows))
    return 0


def _unfinished(run: Path) -> str:
    if not (run / FILE_NAME).is_file():
        raise ConfigError(f"{run} holds no results yet: continue the evaluation with resume=true run_dir={run}")
    known = by_task(read_candidates(run))
    graded = {task: [float(i.passed) for i in items if i.passed is not None] for task, items in known.items()}
    mean, error = clustered_mean(graded)
    return (
        f"not finished: {sum(map(len, known.values()))} rollouts of {len(known)} tasks, "
        f"success {100 * mean:.1f} ± {100 * error:.1f} % so far; go on with resume=true run_dir={run}"
    )
