"""The process group of one torchrun job, and helpers that are identities in a single process."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from swe_rl.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

TIMEOUT_S = 7200.0  # ranks wait for each other through a whole rollout phase


def init_distributed(*, device: str = "auto", timeout_s: float = TIMEOUT_S) -> torch.device:
    """Joins the process group that torchrun's environment describes, if any, and returns this rank's device.

    device: "auto" (a GPU if there is one), "cpu" or "cuda". Uses gloo on the CPU, and nccl beside it on GPUs.
    Idempotent. Raises ConfigError when device="cuda" finds no GPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={device!r} is unknown: use one of auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU: use device=cpu or auto")
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(chosen)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return chosen


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """True on the one rank that names directories, writes files and prints."""
    return rank() == 0


def all_reduce_sum(values: Sequence[float]) -> list[float]:
    """Element-wise sum over ranks, in fp64 on the host. Collective."""
    return _all_reduce(values, dist.ReduceOp.SUM)


def all_reduce_max(values: Sequence[float]) -> list[float]:
    """Element-wise maximum over ranks. Collective."""
    return _all_reduce(values, dist.ReduceOp.MAX)


def _all_reduce(values: Sequence[float], op: Any) -> list[float]:
    if world_size() == 1:
        return [float(value) for value in values]
    total = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(total, op)
    result: list[float] = total.tolist()
    return result


def broadcast_object(value: Any) -> Any:
    """Rank 0's picklable `value` on every rank (a run directory, a seed, a list of task ids). Collective."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather_objects(values: Sequence[Any], *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The picklable items of all ranks (of `group`), concatenated in rank order, on each of them. Collective."""
    size = world_size() if group is None else dist.get_world_size(group)
    if size == 1:
        return list(values)
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, list(values), group=group)
    return [value for part in parts for value in part]


def neighbours(size: int) -> dist.ProcessGroup:
    """The group of `size` ranks with consecutive numbers that this one is in; nodes hold consecutive ranks, so it is
    inside a node where that has a multiple of `size`. Collective over all ranks. `size` must divide their number."""
    group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=TIMEOUT_S))
    return group


def group_of_all() -> dist.ProcessGroup | None:
    """Another group of all ranks, on the host, for a thread that agrees beside the others' collectives; None without
    torchrun. Collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)) if world_size() > 1 else None


def broadcast_string(value: str) -> str:
    """Rank 0's string on every rank. Collective."""
    return str(broadcast_object(value))


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """asyncio.to_thread for work on the device or between ranks: the event loop goes on, and hears signals, meanwhile.

    A new thread would work on GPU 0; this one works on the GPU of the calling thread.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def call() -> R:
        if device is not None:
            torch.cuda.set_device(device)
        return function(*args, **kwargs)

    return await asyncio.to_thread(call)


def barrier() -> None:
    """Returns when every rank has come here. On the host: no device is touched."""
    all_reduce_sum([0.0])


def shutdown() -> None:
    """Leaves the process group, if any. Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def exit_rank(code: int) -> NoReturn:
    """Ends this process after `shutdown`: exit handlers run, streams are flushed, the interpreter is not torn down.

    The teardown may abort a rank whose work is done: a thread of gloo that still lets go of a tensor asks for the
    interpreter's lock, is ended by Python for it, and C++ answers with "terminate called without an active exception".
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
