"""The cases of attention_triton_cases.py, in Triton's interpreter, with every Triton that is there."""

from __future__ import annotations

import pytest
from triton_versions import INSTALLED, OLDER_BY_NIGHT, interpret

CASES = "attention_triton_cases.py"


def test_a_few_values() -> None:
    interpret(CASES, INSTALLED, "-k", "test_values_and_gradients and 17")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("triton", OLDER_BY_NIGHT)
def test_all_values(triton: str) -> None:
    interpret(CASES, triton)
