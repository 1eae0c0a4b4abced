"""megatron-core on a machine without a GPU: its own modules and schedules, on tensors in host memory, over gloo.

megatron-core names CUDA outright in places that have nothing to do with a GPU (the device of a counter, a synchronise
after a send, a stream beside for a copy to the host), and gathers shares of unequal sizes, which gloo refuses.
`install` gives its modules another `torch` that answers for these few names and is torch otherwise; no other module of
the process sees it. It is for tests and small models: what it proves is arithmetic, not speed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange", "zeros_like", "empty_like", "ones_like", "randn")
USED = (  # modules that ask for CUDA on the way of a step, and are not all imported by the model itself
    "megatron.core.parallel_state",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.random",
)
log = logging.getLogger(__name__)


class _HostCuda(ModuleType):
    """torch.cuda where the only device is the CPU: nothing to wait for, no streams."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        state = torch.zeros(1, dtype=torch.uint8)
        self.random = SimpleNamespace(get_rng_state=lambda *_, **__: state, set_rng_state=lambda *_, **__: None)
        self.get_rng_state, self.set_rng_state = self.random.get_rng_state, self.random.set_rng_state

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self, *_: Any) -> None:
        """Everything on a CPU is done when its call returns."""

    def manual_seed(self, seed: int) -> None:
        """There is no generator of a GPU to seed."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def Stream(self, *_: Any, **__: Any) -> _HostStream:
        """There is one order of things, that of the program."""
        return _HostStream()

    def current_stream(self, *_: Any) -> _HostStream:
        return _HostStream()

    default_stream = current_stream

    def stream(self, _: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _HostStream:
    """A stream, and an event of one: what was asked for is done already."""

    def wait_stream(self, _: Any) -> None:
        """Nothing is ahead of anything."""

    def record_event(self) -> _HostStream:
        return self

    def synchronize(self) -> None:
        """Everything on a CPU is done when its call returns."""


class _GlooDistributed(ModuleType):
    """torch.distributed, where ranks may bring shares of unequal sizes and what is sent is gone, as with NCCL."""

    def __init__(self) -> None:
        super().__init__("torch.distributed")
        self._sent: list[tuple[Any, Tensor]] = []  # and not received yet, with what they read

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(self, parts: list[Tensor], own: Tensor, group: Any = None) -> None:
        rows = max(len(part) for part in parts)
        padded = own.new_zeros(rows, *own.shape[1:])
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in parts]
        dist.all_gather(found, padded, group=group)
        for part, each in zip(parts, found, strict=True):
            part.copy_(each[: len(part)])

    def batch_isend_irecv(self, ops: list[dist.P2POp]) -> list[Any]:
        """What is left to wait for is what comes. A gloo send ends when its receiver asks for it, so two ranks that
        first wait for what they sent would wait forever: interleaved stages exchange shapes so."""
        for op in ops:
            if op.op is dist.isend:
                op.tensor = op.tensor.clone()
        works = dist.batch_isend_irecv(ops)
        both = list(zip(ops, works, strict=True))
        left = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        self._sent = left + [(work, op.tensor) for op, work in both if op.op is dist.isend]
        return [work for op, work in both if op.op is dist.irecv]

    def reduce_scatter(self, own: Tensor, parts: list[Tensor], group: Any = None) -> None:
        whole = torch.cat(parts)
        dist.all_reduce(whole, group=group)
        own.copy_(whole.split([len(part) for part in parts])[dist.get_rank(group)])

    def all_to_all_single(
        self, out: Tensor, own: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, group: Any = None
    ) -> None:
        """Sizes may be tensors: on a GPU they are copied to the host first, as arrays."""
        to, of = (None if sizes is None else list(map(int, sizes)) for sizes in (output_split_sizes, input_split_sizes))
        dist.all_to_all_single(out, own, to, of, group=group)


class _HostTorch(ModuleType):
    """torch, with device="cuda" read as "cpu"."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda, self.distributed = _HostCuda(), _GlooDistributed()
        for name in FACTORIES:
            setattr(self, name, _on_host(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


@functools.cache
def install() -> None:
    """For the rest of the process. Idempotent."""
    for name in USED:
        importlib.import_module(name)
    host = _HostTorch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = host  # type: ignore[attr-defined]
    random: Any = sys.modules["megatron.core.tensor_parallel.random"]
    random._lazy_call = lambda call, **_: None  # it would queue calls for a GPU that never comes
    log.info("megatron-core runs on the CPU: over gloo, for tests and small models")


@contextlib.contextmanager
def building() -> Iterator[None]:
    """While a model is made: `.cuda()` of a tensor, which tied embeddings of a pipeline call, leaves it where it is."""
    with mock.patch("torch.Tensor.cuda", lambda tensor, *_, **__: tensor):
        yield
