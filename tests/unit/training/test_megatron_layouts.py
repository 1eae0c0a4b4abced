"""Steps of the Megatron backend on gloo, layout by layout, against transformers and torch's AdamW in one process.

These are megatron-core's own layers and pipeline schedules; only its calls of CUDA are answered by host_device. Losses,
gradients by Hugging Face name, logprobs and two optimiser steps have to agree; a checkpoint has to go on elsewhere.
"""

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

from swe_rl.config import TrainerConfig
from swe_rl.errors import ConfigError
from swe_rl.training.megatron.grid import grid_sizes

BOUNDS = {"float64": 1e-10, "float32": 1e-5}
SCORES = 2e-6  # logprobs come back as fp32
T, C, P, E = "tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"
TOKENS = [181, 87]  # of all rows, trained


def case(name: str, family: str, processes: int, dtype: str = "float64", **more: Any) -> dict[str, Any]:
    options = {key: more.pop(key) for key in ("from_", "stream") if key in more}
    found = {"name": name, "family": family, "processes": processes, "dtype": dtype, "layout": more}
    return {**found, **{key.rstrip("_"): value for key, value in options.items()}}


CASES = [
    case("tp2", "nano", 2, **{T: 2}),
    case("tp2-cp2-recompute", "qwen3", 4, **{T: 2, C: 2, "activation_checkpointing": True}),
    case("tp2-pp2-tied", "nano", 4, **{T: 2, P: 2}),
    case("dp4-offload", "qwen2", 4, offload=True),
    case("one", "qwen3", 1),
    case("dp2", "nano", 2),
    case("cp2", "llama", 2, **{C: 2}),
    case("cp4", "qwen3", 4, **{C: 4}),
    case("pp2", "qwen2", 2, **{P: 2}),
    case("pp4", "qwen3", 4, **{P: 4}),
    case("tp2-dp2-from-files", "qwen2", 4, stream=True, **{T: 2}),
    case("pp2-dp2-tied", "llama", 4, **{P: 2}),
    case("cp2-dp2", "nano", 4, **{C: 2}),
    case("cp2-pp2", "qwen2", 4, **{C: 2, P: 2}),
    case("tp2-single", "llama", 2, "float32", **{T: 2}),
    case("one-single", "qwen3", 1, "float32"),
    case("pp4-interleaved-tied", "deep", 4, **{P: 4, "virtual_pipeline": 2}),
    case("experts-one", "moe", 1),
    case("experts-ep2", "moe", 2, **{E: 2}),
    case("experts-ep2-cp2", "moe", 2, **{E: 2, C: 2}),
    case("experts-ep2-tp2-from-files", "moe", 4, stream=True, **{E: 2, T: 2}),
    case("experts-ep2-dp2-recompute", "moe-even", 4, **{E: 2, "activation_checkpointing": True}),
    case("experts-ep2-pp2-tied", "moe-even", 4, **{E: 2, P: 2}),
    case("experts-ep2-single", "moe", 2, "float32", **{E: 2}),
]
MOVES = [  # a checkpoint of one layout in another
    case("tp2-to-dp2", "nano", 2, from_="tp2"),
    case("dp4-to-pp2", "qwen2", 2, from_="dp4-offload", **{P: 2}),
    case("cp2-to-tp2", "llama", 2, from_="cp2", **{T: 2}),
    case("experts-tp2-to-ep2", "moe", 2, from_="experts-ep2-tp2-from-files", **{E: 2}),
    case("experts-pp2-to-dp2", "moe-even", 2, from_="experts-ep2-pp2-tied"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By case: what each rank measured."""
    require(importlib.util.find_spec("megatron") is not None, "package megatron-core (pip install 'swe-rl[megatron]')")
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "cases.json").write_text(json.dumps([*CASES, *MOVES]))
    worker = Path(__file__).with_name("megatron_layouts_worker.py")
    path = os.pathsep.join([str(worker.parents[3]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(worker), str(folder)], env=env, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {
        each["name"]: [
            json.loads((folder / f"{each['name']}-{rank}.json").read_text()) for rank in range(each["processes"])
        ]
        for each in (*CASES, *MOVES)
    }


@pytest.mark.slow
@pytest.mark.parametrize("wanted", CASES, ids=lambda each: each["name"])
def test_steps_are_those_of_one_process(found: Any, wanted: dict[str, Any]) -> None:
    bound = BOUNDS[wanted["dtype"]]
    for rank in found[wanted["name"]]:
        assert rank["start"] <= (1e-15 if wanted["dtype"] == "float64" else 0)
        assert rank["tokens"] == TOKENS
        assert rank["split"] == (C in wanted["layout"])
        assert rank["logprobs"] <= SCORES
        whole, changed, nothing = rank["published"]  # of the bytes; the worker compares the bits
        assert whole == 1.0
        assert nothing < 0.02
        assert nothing < changed <= 1.0
        for name in ("loss", "grads", "norm", "second", "third"):
            limit = bound if name in ("loss", "grads", "norm") else 10 * bound  # after steps of AdamW
            assert rank[name] <= limit, (name, rank)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", MOVES, ids=lambda each: each["name"])
def test_a_checkpoint_goes_on_in_another_layout(found: Any, wanted: dict[str, Any]) -> None:
    for rank in found[wanted["name"]]:
        assert rank["second"] <= 1e-8
        assert rank["third"] <= 1e-8


@pytest.mark.parametrize(
    ("keys", "processes", "message"),
    [
        ({T: 2, C: 2}, 6, "take 4 processes for one copy of the model, which do not divide the 6"),
        ({P: 4}, 2, "trainer.pipeline_parallel=4 take 4 processes"),
        ({T: 2, E: 4}, 4, "trainer.expert_parallel=4 does not divide the 2 data and context parallel ranks"),
    ],
)
def test_processes_that_cannot_be_shared_out(keys: dict[str, int], processes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grid_sizes(TrainerConfig(backend="megatron", **keys), world_size=processes)  # type: ignore[arg-type]


def test_the_grid_of_a_legal_layout() -> None:
    layout = grid_sizes(TrainerConfig(backend="megatron", tensor_parallel=2, pipeline_parallel=2), world_size=8)
    assert (layout.tensor_parallel, layout.pipeline_parallel, layout.num_stages) == (2, 2, 2)
