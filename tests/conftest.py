"""Shared helpers. `require` turns a missing real part into a skip, or into a failure where SWE_RL_REQUIRE is set."""

from __future__ import annotations

import os

import pytest


def require(available: bool, what: str) -> None:
    """Skips the test when `what` is missing, unless SWE_RL_REQUIRE is set: then it fails."""
    if available:
        return
    if os.environ.get("SWE_RL_REQUIRE"):
        pytest.fail(f"SWE_RL_REQUIRE is set, but {what} is missing")
    pytest.skip(f"{what} is missing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """gpu tests skip without a device even where SWE_RL_REQUIRE is set: no CPU machine can supply one."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
