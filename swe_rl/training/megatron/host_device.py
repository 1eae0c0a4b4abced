"""megatron-core on a machine without a GPU: its own modules and schedules, on tensors in host memory, over gloo.

megatron-core names CUDA outright in places that have nothing to do with a GPU (the device of a counter, a synchronise
after a send). `install` gives its modules another `torch` that answers for these few names and is torch otherwise; no
other module of the process sees it. It is for tests and small models: what it proves is arithmetic, not speed.
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

FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange", "zeros_like", "empty_like", "ones_like", "randn")
USED = (  # modules that ask for CUDA on the way of a step, and are not all imported by the model itself
    "megatron.core.parallel_state",
    "megatron.core.models.gpt",
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


class _HostTorch(ModuleType):
    """torch, with device="cuda" read as "cpu"."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _HostCuda()
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
