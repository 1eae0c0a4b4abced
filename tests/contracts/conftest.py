"""Fixtures of the contract of sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import sandbox_backends
import sandbox_faults
from sandbox_backends import Opener

from swe_rl.sandbox.client import SandboxClient


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """A small tree to be the work directory."""
    tree = tmp_path / "layer"
    (tree / "pkg").mkdir(parents=True)
    (tree / "pkg" / "a.py").write_text("A = 1\n")
    (tree / "pkg" / "b.py").write_text("B = 2\n")
    (tree / "readme").write_text("hello\n")
    return tree


@pytest.fixture(params=["local", "docker"])
def opener(request: pytest.FixtureRequest) -> Opener:
    """Starts a sandbox of one backend: `async with await opener(spec) as sandbox`."""
    sandbox_backends.require_mode(request.param)
    return partial(sandbox_backends.start, request.param)


@pytest.fixture
async def sandbox(opener: Opener, layer: Path) -> AsyncIterator[SandboxClient]:
    """One over `layer`, with the limits of the fault table."""
    async with await opener(replace(sandbox_faults.SPEC, layers=(str(layer),))) as opened:
        yield opened
