"""Our sharded AdamW against megatron-core's DistributedOptimizer: the same step, up to fp32."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import forked_ranks
import pytest
from real_parts import require


@pytest.mark.slow
def test_a_step_is_that_of_megatrons_own_optimizer(tmp_path: Path) -> None:
    require(importlib.util.find_spec("megatron") is not None, "package megatron-core (pip install 'swe-rl[megatron]')")
    import megatron_optimizer_worker

    forked_ranks.start(megatron_optimizer_worker, tmp_path)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["norm"] < 1e-6
        assert found["weights"] < 1e-6
        assert found["moved"] > 1e-2  # or all of it would say nothing
