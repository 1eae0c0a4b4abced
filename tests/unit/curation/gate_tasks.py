"""Tasks built to have each verdict of the gate, small enough to be graded in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swe_rl.tasks import materialize, task_spec, tree_commit, tree_diff
from swe_rl.types import Limits, SandboxSpec, Task

BUGGY = b'''"""Numbers."""


def mean_of_squares(values):
    total = sum(value * value for value in values)
    return total / (len(values) + 1)


def half(x):
    return x / 2
'''
FIXED = BUGGY.replace(b"(len(values) + 1)", b"len(values)")
HIDDEN = b"""from pkg.stats import half, mean_of_squares


def test_mean():
    assert mean_of_squares([1, 2, 3, 4]) == 7.5


def test_half():
    assert half(9) == 4.5
"""
COIN = b"""

def test_coin():
    import os
    assert os.urandom(1)[0] < 128
"""
ORDERED = b"""from pkg.stats import half, mean_of_squares
seen = []

def test_a(): seen.append(1)
def test_b(): assert seen
def test_c(): assert seen
def test_d(): assert seen
def test_mean(): assert mean_of_squares([1, 2, 3, 4]) == 7.5
def test_half(): assert half(9) == 4.5
"""
SLEEP = b"""

def test_sleep():
    import time
    time.sleep(30)
"""
OTHERS = b"\n".join(b"def test_%d():\n    pass\n" % number for number in range(3))


def make(name: str, *, tree: dict[str, bytes] | None = None, **changes: Any) -> Task:
    files = {"pkg/__init__.py": b"", "pkg/stats.py": BUGGY, **(tree or {})}
    task = Task(
        task_id=f"gate/{name}",
        source="unit",
        split="train",
        repo="unit",
        base_commit=tree_commit(files),
        problem_statement="mean_of_squares is too small",
        fail_to_pass=("tests/test_hidden.py::test_mean",),
        pass_to_pass=("tests/test_hidden.py::test_half",),
        gold_patch=tree_diff({"pkg/stats.py": BUGGY}, {"pkg/stats.py": FIXED}),
        tree=files,
        hidden_files={"tests/test_hidden.py": HIDDEN},
        timeout_s=20.0,
    )
    return replace(task, **changes)


def with_test(name: str, extra: bytes, test: str) -> Task:
    task = make(name)
    return replace(
        task,
        hidden_files={"tests/test_hidden.py": HIDDEN + extra},
        pass_to_pass=(*task.pass_to_pass, f"tests/test_hidden.py::{test}"),
    )


def order_task(packages: Path) -> Task:
    """Its tests pass in the order of their file only. Run by pytest, which a mount brings."""
    names = [f"tests/test_hidden.py::test_{name}" for name in ("a", "b", "c", "d", "half")]
    return make(
        "order",
        test_runner="pytest",
        hidden_files={"tests/test_hidden.py": ORDERED},
        pass_to_pass=tuple(names),
        meta={"mounts": [[str(packages), "/opt/packages"]], "env": {"PYTHONPATH": "/opt/packages"}},
    )


def pytest_packages() -> Path:
    return Path(pytest.__file__).parents[1]


def spec_of(trees: Path):
    base = SandboxSpec(limits=Limits(memory_bytes=256 << 20, disk_bytes=64 << 20))

    def spec(task: Task) -> SandboxSpec:
        return task_spec(task, base, tree=materialize(task, trees) if task.tree else None)

    return spec
