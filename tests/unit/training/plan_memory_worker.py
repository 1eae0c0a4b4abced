"""Peak memory of training steps on this CPU: `python plan_memory_worker.py CASE` prints the bytes above what was there.

CASE is JSON: keys of ModelConfig, and dtype, recompute, document (tokens of each), documents (in each of two rows).
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch

from swe_rl.batching import pack
from swe_rl.config import AlgoConfig, ModelConfig, TrainerConfig
from swe_rl.models.nano import build_model
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import PackedBatch, TrainSample

TRAINED_SHARE = 0.25
ROWS = 2  # gradients of the first are there when the second is at its peak


def rows(*, vocab: int, document: int, documents: int) -> list[PackedBatch]:
    rng = random.Random(0)
    samples = []
    for index in range(documents * ROWS):
        mask = [False, *(rng.random() < TRAINED_SHARE for _ in range(document - 1))]
        samples.append(
            TrainSample(
                trajectory_id=f"t{index}",
                input_ids=[rng.randrange(vocab) for _ in range(document)],
                loss_mask=mask,
                rollout_logprobs=[-4.0 if m else 0.0 for m in mask],
                advantages=[1.0 if m else 0.0 for m in mask],
                turn_ids=[0 if m else -1 for m in mask],
                policy_version=0,
                temperature=1.0,
                token_weights=[1e-4 if m else 0.0 for m in mask],
            )
        )
    return list(pack(samples, max_tokens=document * documents))


def train(case: dict[str, Any]) -> None:
    sizes = {key: case[key] for key in ModelConfig.__dataclass_fields__ if key in case and key != "dtype"}
    model = build_model(ModelConfig(**sizes))
    settings = TrainerConfig(learning_rate=1e-4, activation_checkpointing=case["recompute"] == "full")
    backend = TorchBackend(model, settings, algo=AlgoConfig(), dtype=getattr(torch, case["dtype"]))
    batches = rows(vocab=case["vocab_size"], document=case["document"], documents=case["documents"])
    assert len(batches) == ROWS
    for _ in range(2):  # the optimizer's state is made at the end of the first step
        backend.train_step(batches, learning_rate=1e-4)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    tiny = {"hidden_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64}
    train({**case, **tiny, "vocab_size": 64, "document": 16, "documents": 2})  # libraries, their code and scratch
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    train(case)
    print(json.dumps({"bytes": peak() - before}))


if __name__ == "__main__":
    main()
