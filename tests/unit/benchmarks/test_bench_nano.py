"""Pooling of runs: what a run began with, paired gains, and the gain of the whole chain."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[3] / "benchmarks" / "bench_nano.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_nano", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(phase: str, **by_task: float) -> dict[str, Any]:
    return {
        "split": "heldout",
        "mode": "sampled",
        "phase": phase,
        "by_task": {task: [value] for task, value in by_task.items()},
    }


def test_base_of_a_run_with_given_weights_is_the_phase_it_began_with(bench: Any) -> None:
    whole = [row("base", a=0.0), row("warm_start", a=0.0, b=0.0, c=1.0), row("rl", a=1.0, b=0.0, c=1.0)]
    given = [row("base", a=0.0, b=1.0, c=1.0), row("rl", a=1.0, b=1.0, c=0.0)]
    assert bench.renamed(whole, "warm_start") == whole
    runs = [bench.renamed(rows, "warm_start") for rows in (whole, given)]
    lines = {line["phase"]: line for line in bench.table(runs)}
    assert lines["base"]["num_tasks"] == 1
    assert lines["warm_start"]["success"] == pytest.approx(3 / 6)
    assert lines["rl"]["success"] == pytest.approx(4 / 6, abs=1e-4)
    assert lines["rl"]["gain"] == pytest.approx(1 / 6, abs=1e-4)
    assert lines["warm_start to end"]["gain"] == pytest.approx(1 / 6, abs=1e-4)
    assert lines["rl"]["num_runs"] == 2
