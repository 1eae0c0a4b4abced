"""The plan of the torch backend against the peak that training steps really reach on this CPU, within a tenth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swe_rl.config import ModelConfig
from swe_rl.training.planning.layouts import Layout
from swe_rl.training.planning.memory_megatron import Work
from swe_rl.training.planning.memory_torch import rank_memory
from swe_rl.training.planning.parts import total
from swe_rl.training.planning.shapes import model_shape

WORKER = Path(__file__).with_name("plan_memory_worker.py")
CASES: dict[str, dict[str, Any]] = {
    "activations: nano in fp32": {
        "hidden_size": 192,
        "num_layers": 3,
        "num_heads": 8,
        "num_kv_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 1024,
        "dtype": "float32",
        "recompute": "none",
        "document": 640,
        "documents": 8,
    },
    "weights and activations: bf16 with fp32 masters": {
        "hidden_size": 512,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 4,
        "intermediate_size": 1536,
        "vocab_size": 8192,
        "dtype": "bfloat16",
        "recompute": "none",
        "document": 512,
        "documents": 4,
    },
    "weights: recomputed activations": {
        "hidden_size": 768,
        "num_layers": 4,
        "num_heads": 12,
        "num_kv_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 4096,
        "dtype": "float32",
        "recompute": "full",
        "document": 512,
        "documents": 4,
    },
}


def predicted(case: dict[str, Any]) -> int:
    shape = model_shape(ModelConfig(**{k: v for k, v in case.items() if k in ModelConfig.__dataclass_fields__}))
    work = Work(
        row_tokens=case["document"] * case["documents"], rows_per_rank=2, trained_share=0.25, dtype=case["dtype"]
    )
    return total(rank_memory(shape, Layout(backend="torch", recompute=case["recompute"]), work, cpu=True))


def measured(case: dict[str, Any]) -> int:
    root = str(WORKER.parents[3])
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "MALLOC_MMAP_THRESHOLD_": "262144",  # or glibc keeps what was freed, and the peak is that of its heap
    }
    command = [sys.executable, str(WORKER), json.dumps(case)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(json.loads(done.stdout)["bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_predicted_peak_is_the_measured_one(name: str, record_property: Any) -> None:
    expected, found = predicted(CASES[name]), measured(CASES[name])
    record_property("predicted_over_measured", expected / found)
    assert expected / found == pytest.approx(1, abs=0.10), (expected, found)
