"""Adapters merged for an export by two gloo ranks that share the model: `adapter_export_worker.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import forked_ranks
import torch

from swe_rl.config import AlgoConfig, ModelConfig, TrainerConfig
from swe_rl.models.adapters import SUFFIXES, adapt
from swe_rl.models.nano import build_model
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.training.weight_adapters import merged_on_host

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "intermediate_size": 25,
}


def work(rank: int) -> None:
    model = build_model(ModelConfig(**SHAPE, vocab_size=50))
    adapt(model, rank=3, alpha=6.0)
    generator = torch.Generator().manual_seed(5)
    for name, param in model.named_parameters():
        if name.endswith(SUFFIXES):
            param.data.normal_(generator=generator)
    backend = TorchBackend(model, TrainerConfig(fsdp=True), algo=AlgoConfig())
    want = backend.weights()
    trained = backend.masters.full_on_host(keep=rank == 0)
    assert bool(trained) == (rank == 0)
    found = merged_on_host(model, trained, keep=rank == 0)
    assert found.keys() == (want.keys() if rank == 0 else set())
    assert all(torch.equal(tensor, want[name]) for name, tensor in found.items())


if __name__ == "__main__":
    forked_ranks.fork(Path(sys.argv[1]), [2], lambda rank, _: work(rank))
