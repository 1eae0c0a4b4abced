"""The README's claim, measured: the default experiment learns, phase by phase, on tasks it has never seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swe_rl.cli.table import results_table
from swe_rl.evaluation import paired_difference
from swe_rl.metrics import METRICS_FILE, read_metrics

PHASES = ["base", "warm_start", "rft", "rl"]


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
    assert heldout["warm_start"]["success"] >= 0.1, "demonstrations taught too little to go on from"
    for earlier, later in (("warm_start", "rft"), ("rft", "rl")):
        gain = paired_difference(heldout[later]["by_task"], heldout[earlier]["by_task"])
        assert gain.low > 0, (
            f"{later} is not better than {earlier}: {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
        )
    steps = [record.values for record in read_metrics(run_dir / METRICS_FILE) if record.phase == "rl" and record.step]
    assert all(values["train/skipped"] == 0 for values in steps)
    assert all(values["train/logprob_abs_diff"] <= 1e-4 for values in steps), "trainer and engine disagree"
