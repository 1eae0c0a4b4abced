"""Bytes that autograd keeps for one more layer of the model that the megatron backend builds, by family and dtype, as
JSON: `plan_megatron_worker.py CONFIGS`, the keywords of Hugging Face configs. In one process on a CPU; a storage counts
once.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn
from transformers import AutoConfig

from swe_rl.config import TrainerConfig
from swe_rl.training.megatron.grid import Grid, open_grid
from swe_rl.training.megatron.model import build_chunks, run_stage
from swe_rl.training.planning.shapes import shape_from_config

TOKENS = 256


def build(config: dict[str, Any], grid: Grid, *, layers: int, dtype: torch.dtype) -> nn.Module:
    hf = AutoConfig.for_model(**{**config, "num_hidden_layers": layers})
    shape = shape_from_config(hf, name=hf.model_type)
    (model,) = build_chunks(hf, shape, grid, TrainerConfig(backend="megatron"), dtype=dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def kept_bytes(model: nn.Module) -> int:
    """Of all tensors that one forward pass saves, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: list[Tensor] = []  # alive, so that no storage is counted under the address of another

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    borders = torch.tensor([0, TOKENS], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run_stage(model, torch.arange(TOKENS) % 128, params, lambda hidden, weight: hidden.sum())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    del result
    return sum(size for address, size in storages.items() if address not in parameters)


def main(configs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    found = []
    grid = open_grid(TrainerConfig(backend="megatron"), device=torch.device("cpu"))
    for config in configs:
        for name in ("float32", "bfloat16"):
            sizes = [kept_bytes(build(config, grid, layers=n, dtype=getattr(torch, name))) for n in (1, 2)]
            found.append({"family": config["model_type"], "dtype": name, "bytes": (sizes[1] - sizes[0]) / TOKENS})
    torch.distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
