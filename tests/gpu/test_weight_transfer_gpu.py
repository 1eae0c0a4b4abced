"""A tensor of one process read by another one, where it lies on the GPU: what engine.weight_transfer=ipc rests on.

Written without a GPU: not run yet. The engine itself: tests/contracts/test_engine_layouts.py.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

pytest.importorskip("omegaconf")
from swe_rl.inference.vllm.device_transfer import ipc_arguments, ipc_handle
from swe_rl.ops.weight_delta import checksum

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WAIT_S = 120.0


def _read(handle: dict[str, Any], answers: Any) -> None:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    own = rebuild_cuda_tensor(*ipc_arguments(handle)).clone()
    answers.put((list(own.shape), checksum(own)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_process_reads_the_same_bits(dtype: torch.dtype) -> None:
    flat = torch.randn(5000, device="cuda").to(dtype)
    tensor = flat[16 : 16 + 37 * 101].view(37, 101)  # inside an allocation that holds more
    torch.cuda.synchronize()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=_read, args=(ipc_handle(tensor), answers))
    child.start()
    try:
        assert answers.get(timeout=WAIT_S) == ([37, 101], checksum(tensor))
    finally:
        child.join(timeout=WAIT_S)
