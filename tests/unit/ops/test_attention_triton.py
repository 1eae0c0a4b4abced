"""The cases of attention_triton_cases.py, in Triton's interpreter, with every Triton that is there."""

from __future__ import annotations

import importlib.util

import pytest
from real_parts import require
from triton_versions import INSTALLED, OLDER_BY_NIGHT, run_with_triton

CASES = "tests/unit/ops/attention_triton_cases.py"


def run_cases(triton: str, *selection: str) -> None:
    require(triton != INSTALLED or importlib.util.find_spec("triton") is not None, "package triton")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", CASES, *selection]
    done = run_with_triton(triton, command, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_few_values() -> None:
    run_cases(INSTALLED, "-k", "test_values_and_gradients and 17")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("triton", OLDER_BY_NIGHT)
def test_all_values(triton: str) -> None:
    run_cases(triton)
