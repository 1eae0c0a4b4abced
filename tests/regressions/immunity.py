"""How the regression tests of known bugs are built: one check, run on the formula with the bug and on ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

X = TypeVar("X")


def immune(check: Callable[[X], None], *, ours: X, buggy: X) -> None:
    """`check` must pass on `ours` and fail on `buggy`: a check that the bug passes as well proves nothing."""
    check(ours)
    with pytest.raises((AssertionError, ZeroDivisionError, IndexError, TypeError)):
        check(buggy)
