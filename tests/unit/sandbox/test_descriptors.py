"""The limit of open files follows the number of sandboxes."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator

import pytest

from swe_rl.sandbox import SandboxPool
from swe_rl.sandbox.descriptors import allow_descriptors


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_pool_asks_for_what_its_sandboxes_need(caplog: pytest.LogCaptureFixture) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    SandboxPool(100, grading=20, warm=8)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512 + 6 * 128, hard)
    SandboxPool(1, grading=1)  # never less than before
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512 + 6 * 128, hard)
    assert not caplog.records


def test_a_hard_limit_that_is_too_low_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: asked.append(limits))
    with caplog.at_level(logging.WARNING):
        allow_descriptors(1000)
    assert asked == [(1000, 1000)]
    assert "1000 sandboxes need 6512 open files, but only 1000 are allowed" in caplog.text
