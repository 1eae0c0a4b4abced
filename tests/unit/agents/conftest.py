"""Where the tools of a test run: `pytestmark = ON_BOTH_BACKENDS` of a module runs its tests on each backend."""

from __future__ import annotations

import pytest
import tool_calls


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """open_tools opens sandboxes of this backend."""
    monkeypatch.setattr(tool_calls, "backend", request.param)
