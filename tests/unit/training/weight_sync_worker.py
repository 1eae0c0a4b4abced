"""An engine that only keeps weights, and what one torchrun rank does in test_weight_sync.

Run as a script under torchrun: `weight_sync_worker.py FOLDER`; each rank writes FOLDER/rank-N.pt.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from swe_rl.errors import EngineError
from swe_rl.inference.weight_update import DTYPES, UpdatePlan, WeightBucket, WeightInbox, WeightPiece
from swe_rl.ops.weight_delta import Delta

BUCKET_BYTES = 4096
MODES = ("full", "delta", "adapters")  # adapters: deltas of a model with adapters
REGRESSIONS = Path(__file__).parents[2] / "regressions"


def rounded(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.detach().to(dtype).clone() for name, tensor in weights.items()}


async def nap() -> None:
    await asyncio.sleep(0.005)


class Receiver:
    """Implements WeightReceiver. `failures` updates fail in their first bucket; `damage_next` spoils one bucket."""

    def __init__(self, backend: Any, dtype: str = "bfloat16") -> None:
        self.dtype = DTYPES[dtype]
        shapes = {name: param.shape for name, param in backend.masters.params.items()}
        self.inbox = WeightInbox({name: torch.zeros(shape, dtype=self.dtype) for name, shape in shapes.items()})
        self.plans: list[UpdatePlan] = []
        self.bucket_bytes: list[int] = []
        self.failures, self.damage_next = 0, False

    async def start_weight_update(self, plan: UpdatePlan) -> bool:
        self.plans.append(plan)
        return self.inbox.start(plan)

    async def receive_weights(self, bucket: WeightBucket) -> None:
        self.bucket_bytes.append(bucket.num_bytes)
        if self.failures:
            self.failures -= 1
            raise EngineError("out of memory")
        if self.damage_next:
            self.damage_next, bucket = False, _spoiled(bucket)
        self.inbox.receive(bucket)

    async def finish_weight_update(self, checksums: Mapping[str, int]) -> list[str]:
        return self.inbox.finish(checksums)


def _spoiled(bucket: WeightBucket) -> WeightBucket:
    """The first value of its first piece that has one is another one."""
    pieces = []
    done = False
    for piece in bucket.pieces:
        values: Any = piece.values
        flat = values.values.clone() if isinstance(values, Delta) else values.clone()
        if len(flat) and not done:
            flat[0], done = flat[0] + 1.0, True
        if isinstance(values, Delta):
            values = Delta(size=values.size, counts=values.counts, offsets=values.offsets, values=flat)
        else:
            values = flat
        pieces.append(WeightPiece(name=piece.name, first=piece.first, values=values))
    assert done
    return WeightBucket(tuple(pieces))


def run_ranks(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What every rank of a torchrun job has written."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(REGRESSIONS), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    done = subprocess.run([*command, __file__, str(folder)], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]


async def publish_versions(backend: Any, batches: Any, mode: str) -> dict[str, Any]:
    from swe_rl.training.weight_sync import WeightPublisher

    engine = Receiver(backend)
    sent = "full" if mode == "full" else "delta"
    publisher = WeightPublisher(backend, [engine], mode=sent, dtype="bfloat16", bucket_bytes=BUCKET_BYTES)
    reports = []
    calls: list[str] = []
    for step in range(3):
        with _counting_whole_gathers(calls):
            report = asdict(await publisher.publish())
        reports.append({key: report[key] for key in ("version", "delta", "resync", "num_changed", "full_bytes")})
        if step < 2:
            backend.train_step(batches, learning_rate=1e-5)
    return {
        "reports": reports,
        "gathered_whole": len(calls),
        "largest_bucket": max(engine.bucket_bytes),
        "weights": dict(engine.inbox.targets),
        "merged": {name: tensor.clone() for name, tensor in backend.weights().items()},
    }


@contextmanager
def _counting_whole_gathers(calls: list[str]) -> Iterator[None]:
    """Meanwhile `calls` gets an entry for every call of DTensor.full_tensor."""
    original = DTensor.full_tensor

    def counted(self: DTensor, **options: Any) -> Tensor:
        calls.append(str(self.shape))
        return original(self, **options)

    DTensor.full_tensor = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        DTensor.full_tensor = original  # type: ignore[method-assign]


def trainer_and_batches(mode: str) -> tuple[Any, Any]:
    """Sharded where there are several ranks; in fp64, so that sums over ranks round to the same bf16 values."""
    import gradients_worker

    from swe_rl.config import TrainerConfig
    from swe_rl.models.adapters import adapt
    from swe_rl.training import mesh
    from swe_rl.training.torch_backend import TorchBackend

    rank, world = mesh.rank(), mesh.world_size()
    model = gradients_worker.build_model(torch.float64)
    if mode == "adapters":
        adapt(model, rank=3, alpha=6.0)
    backend = TorchBackend(model, TrainerConfig(fsdp=world > 1), algo=gradients_worker.ALGO)
    return backend, gradients_worker.rank_share(gradients_worker.make_samples(), rank=rank, world=world)


def main(folder: str) -> None:
    from swe_rl.training import mesh

    torch.set_num_threads(1)
    mesh.init_distributed(device="cpu")
    found = {mode: asyncio.run(publish_versions(*trainer_and_batches(mode), mode)) for mode in MODES}
    torch.save(found, Path(folder) / f"rank-{mesh.rank()}.pt")
    mesh.barrier()
    mesh.shutdown()
    mesh.exit_rank(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
