"""The cases of triton_interpreter_cases.py, in Triton's interpreter, with every Triton that is there."""

from __future__ import annotations

import pytest
from triton_versions import INSTALLED, TRITONS, interpret

CASES = "triton_interpreter_cases.py"


def test_row_kernels_at_one_size() -> None:
    interpret(CASES, INSTALLED, "-k", "1000 and test_row_grad or certain_token or underflow")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("triton", TRITONS)
def test_all_values(triton: str) -> None:
    interpret(CASES, triton)
