"""`require`: a missing real part is a skip, or a failure where SWE_RL_REQUIRE is set. `real_data`: real files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def require(available: bool, what: str) -> None:
    """Skips the test when `what` is missing, unless SWE_RL_REQUIRE is set: then it fails."""
    if available:
        return
    if os.environ.get("SWE_RL_REQUIRE"):
        pytest.fail(f"SWE_RL_REQUIRE is set, but {what} is missing")
    pytest.skip(f"{what} is missing")


def real_data(name: str) -> Path:
    """A file of the collection of real data that SWE_RL_REAL_DATA names; skips the test when that is not set."""
    root = os.environ.get("SWE_RL_REAL_DATA")
    if not root:
        pytest.skip("SWE_RL_REAL_DATA is not set")
    path = Path(root) / name
    assert path.exists(), f"SWE_RL_REAL_DATA has no {name}"
    return path
