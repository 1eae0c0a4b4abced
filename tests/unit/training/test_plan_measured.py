"""The plan against what happens: peaks of the torch trainer on this CPU, and what Megatron's layers keep."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_parts import require
from transformers import AutoConfig

from swe_rl.config import ModelConfig
from swe_rl.training.planning.memory_megatron import Work, layer_bytes
from swe_rl.training.planning.memory_torch import rank_memory
from swe_rl.training.planning.parallel_layouts import ParallelLayout
from swe_rl.training.planning.parts import total
from swe_rl.training.planning.shapes import model_shape, shape_from_config

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
        "documents": 4,
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
        "documents": 2,
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
        "documents": 2,
    },
}


def predicted(case: dict[str, Any]) -> int:
    shape = model_shape(ModelConfig(**{k: v for k, v in case.items() if k in ModelConfig.__dataclass_fields__}))
    work = Work(
        row_tokens=case["document"] * case["documents"], rows_per_rank=2, trained_share=0.25, dtype=case["dtype"]
    )
    return total(rank_memory(shape, ParallelLayout(backend="torch", recompute=case["recompute"]), work, cpu=True))


def answer_of(worker: str, *words: str, **env: str) -> Any:
    """What a script beside this file prints, as JSON."""
    path = Path(__file__).with_name(worker)
    paths = os.pathsep.join([str(path.parents[3]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(path), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **env},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def measured(case: dict[str, Any]) -> int:
    # glibc would keep much of what was freed, and the peak would be that of its heap.
    return int(answer_of("plan_memory_worker.py", json.dumps(case), MALLOC_MMAP_THRESHOLD_="262144")["bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_predicted_peak_is_the_measured_one(name: str, record_property: Any) -> None:
    expected, found = predicted(CASES[name]), measured(CASES[name])
    record_property("predicted_over_measured", expected / found)
    assert expected / found == pytest.approx(1, abs=0.10), (expected, found)


@pytest.mark.slow
def test_layers_of_megatron_keep_what_the_formula_says() -> None:
    """Bytes per token of one more layer, by family and dtype; positions are not counted, hence the tolerance."""
    require(importlib.util.find_spec("megatron") is not None, "package megatron-core (pip install 'swe-rl[megatron]')")
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 128}
    mixture = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
    configs = [
        {"model_type": "qwen3", "head_dim": 16, "intermediate_size": 160, **sizes},
        {"model_type": "qwen2", "intermediate_size": 160, **sizes},
        {"model_type": "qwen3_moe", "head_dim": 16, **mixture, **sizes},
    ]
    shapes = {
        config["model_type"]: shape_from_config(
            AutoConfig.for_model(**config, num_hidden_layers=1), name=config["model_type"]
        )
        for config in configs
    }
    for found in answer_of("plan_megatron_worker.py", json.dumps(configs)):
        size = {"float32": 4, "bfloat16": 2}[found["dtype"]]
        expected = layer_bytes(shapes[found["family"]], recompute="none", dtype_bytes=size)
        assert expected / found["bytes"] == pytest.approx(1, abs=0.02), found
