"""One step of megatron-core's own DistributedOptimizer beside one of ours, on two gloo ranks with the same weights.

`python megatron_optimizer_worker.py FOLDER` writes FOLDER/RANK.json. Megatron's optimizer asks tensors for the names of
their CUDA types; `cuda_names` answers for it. It has no fp64.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import forked_ranks
import megatron_layouts_worker as layouts
import torch
from torch import Tensor

from swe_rl.training.megatron import host_device, model, passes
from swe_rl.training.megatron.backend import MegatronBackend
from swe_rl.training.megatron.rows import rank_row, replica_rows
from swe_rl.training.stats import StepTotals

NAMES = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}


@contextlib.contextmanager
def cuda_names() -> Iterator[None]:
    plain = torch.Tensor.type

    def named(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(tensor, *args, **kwargs) if args or kwargs else NAMES.get(tensor.dtype, plain(tensor))

    with mock.patch("torch.Tensor.type", named):
        yield


def run_wrapped(wrapper: Any, ids: Tensor, params: Any, head: Any) -> Tensor:
    """As model.run_stage, of a model inside Megatron's data parallel wrapper."""
    if model.has_hook():
        return model.run_stage(wrapper, ids, params, head)
    wrapper.module.head = head
    out: Tensor = wrapper(ids[None], torch.zeros_like(ids)[None], None, packed_seq_params=params)
    return out


def their_step(backend: MegatronBackend, rows: list[Any]) -> tuple[float, dict[str, Tensor]]:
    """(gradient norm, weights by Megatron's names) after one step from the weights of `backend`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    host_device.install.cache_clear()  # the optimizer's modules are here only now
    host_device.install()
    (chunk,) = model.build_chunks(backend.model.config, backend.shape, backend.grid, backend.cfg, dtype=backend.dtype)
    chunk.load_state_dict(backend.stage[0].state_dict(), strict=False)
    shared = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapper: Any = DistributedDataParallel(chunk.config, shared, chunk)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=layouts.RATE,
        weight_decay=layouts.DECAY,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        params_dtype=backend.dtype,
    )
    optimizer: Any = get_megatron_optimizer(settings, [wrapper], use_gloo_process_groups=False)
    for group in optimizer.param_groups:  # which Megatron's scheduler of rates would set
        group["lr"], group["weight_decay"] = layouts.RATE, layouts.DECAY * group["wd_mult"]
    wrapper.zero_grad_buffer()
    found, _ = replica_rows(rows, backend.grid)
    prepared = [rank_row(row, index, backend.grid, scoring=False) for index, row in enumerate(found)]
    with mock.patch.object(passes, "run_stage", run_wrapped):
        alone = passes.Passes(chunks=[wrapper], grid=backend.grid, vocab=backend.shape.vocab)
        alone.train(prepared, algo=backend.algo, objective="policy_gradient", totals=StepTotals())
    wrapper.finish_grad_sync()
    stepped, norm, _ = optimizer.step()
    assert stepped
    return float(norm), {name: param.detach() for name, param in chunk.named_parameters()}


def work(folder: Path, rank: int, size: int) -> None:
    case = {"name": "own", "family": "qwen2", "dtype": "float32", "layout": {}}
    backend, rows = layouts.make(case, folder), layouts.share(rank, size)
    before = {name: param.detach().clone() for name, param in backend.stage[0].named_parameters()}
    with cuda_names():
        norm, theirs = their_step(backend, rows)
    ours = backend.train_step(rows, learning_rate=layouts.RATE)
    mine = {name: param.detach() for name, param in backend.stage[0].named_parameters()}
    found = {
        "norm": abs(ours.grad_norm / norm - 1),
        "weights": layouts.errors(mine, theirs)[0],
        "moved": layouts.errors(before, theirs)[0],
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    forked_ranks.fork(target, [2], lambda rank, size: work(target, rank, size))
