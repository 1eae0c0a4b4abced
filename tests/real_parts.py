"""`require`: a missing real part is a skip, or a failure where SWE_RL_REQUIRE is set."""

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
