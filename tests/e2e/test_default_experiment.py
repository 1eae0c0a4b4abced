"""The README's claim, measured: the default experiment learns, phase by phase, on tasks it has never seen."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swe_rl.cli.table import results_table
from swe_rl.metrics import METRICS_FILE, read_metrics

PHASES = ["base", "warm_start", "rft", "rl"]


def difference(low: dict[str, Any], high: dict[str, Any]) -> tuple[float, float]:
    """(how much more succeeds, its standard error); the rows are of one task set, so this error is on the safe side."""
    return high["success"] - low["success"], math.hypot(low["stderr"], high["stderr"])


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_the_default_experiment_learns(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    clean = {**os.environ, "SWE_RL_CACHE": str(tmp_path / "cache")}  # the warm start is trained, not taken from a cache
    subprocess.run([sys.executable, "-m", "swe_rl", "train", f"run_dir={run_dir}"], env=clean, check=True)
    rows = json.loads((run_dir / "results.json").read_text())
    print(results_table(rows))
    heldout = {row["phase"]: row for row in rows if (row["split"], row["mode"]) == ("heldout", "sampled")}
    assert list(heldout) == PHASES
    assert all(row["num_lost"] == 0 for row in rows), "rollouts were lost to the machine"
    assert heldout["base"]["success"] <= 0.05, "an untrained policy solves tasks: they leak their answers"
    for earlier, later in (("base", "warm_start"), ("warm_start", "rl")):
        gain, stderr = difference(heldout[earlier], heldout[later])
        assert gain > 2 * stderr, f"{later} is not better than {earlier}: {gain:+.3f} ± {stderr:.3f}"
    steps = [record.values for record in read_metrics(run_dir / METRICS_FILE) if record.phase == "rl" and record.step]
    assert all(values["train/skipped"] == 0 for values in steps)
    assert all(values["train/logprob_abs_diff"] <= 1e-4 for values in steps), "trainer and engine disagree"
