"""What ops.triton_rows promises without a GPU: lazy imports, the checkout beside the package, chunks, dtypes."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from real_parts import require

from swe_rl.ops import triton_rows

ROOT = Path(__file__).parents[3]


def run_code(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_importing_ops_needs_no_triton_and_loads_no_kernel() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"  # torch imports it by itself where it is installed
        "import swe_rl.ops, swe_rl.ops.triton_rows\n"
        "print('swe_rl.kernels' in sys.modules)"
    )
    assert run_code(code).strip() == "False"


def test_the_kernels_are_found_in_a_checkout_that_is_not_installed() -> None:
    require(importlib.util.find_spec("triton") is not None, "package triton")
    code = (
        "import sys, importlib.util\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"  # the installed mapping
        "from swe_rl.ops import triton_rows\n"
        "assert importlib.util.find_spec('swe_rl.kernels') is None\n"
        "print(triton_rows.kernel_module('head_stream').__file__)\n"
        "print(sys.modules['swe_rl.kernels.head_rows'].__name__ if triton_rows.kernel_module('head_rows') else '')"
    )
    path, name = run_code(code).split()
    assert Path(path) == ROOT / "kernels" / "triton_ops" / "head_stream.py"
    assert name == "swe_rl.kernels.head_rows"


def test_a_missing_triton_is_a_config_error_with_the_cure() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from swe_rl.errors import ConfigError\n"
        "from swe_rl.ops import triton_rows\n"
        "print(triton_rows.available())\n"
        "try:\n    triton_rows.kernel_module('head_rows')\n"
        "except ConfigError as error:\n    print(error)"
    )
    said = run_code(code).splitlines()
    assert said[0].startswith("(False, ")
    assert all("pip install" in line for line in said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_the_reason_is_given() -> None:
    require(importlib.util.find_spec("triton") is not None, "package triton")
    code = "from swe_rl.ops import triton_rows; print(*triton_rows.available())"
    assert "no CUDA device" in run_code(code, TRITON_INTERPRET="0")
    assert "interpreter" in run_code(code, TRITON_INTERPRET="1")


@pytest.mark.parametrize("vocab", [7, 1000, 18992, 49152, 151936, 2_000_000])
@pytest.mark.parametrize("rows", [1, 127, 1024, 4609, 8192, 131072, 131073])
def test_chunks_are_few_and_equal(vocab: int, rows: int) -> None:
    size = triton_rows.chunk_rows(rows, vocab)
    count = -(-rows // size)
    assert size <= 8192
    if count > 1:
        assert size % 128 == 0
        assert size >= 1024 - 128
        assert count * size - rows < 128 * count  # the last chunk is at most a multiple's worth shorter per chunk
        assert size <= 1024 or 6 * size * vocab <= 4 << 30


def test_chunks_at_the_sizes_that_matter() -> None:
    assert triton_rows.chunk_rows(0, 151936) == 1
    assert triton_rows.chunk_rows(8192, 151936) == 4096  # two equal ones of at most 4.3 GB
    assert triton_rows.chunk_rows(8192, 151936 // 2) == 8192
    assert triton_rows.chunk_rows(300, 151936) == 300


def test_only_bf16_gradients_are_narrow() -> None:
    assert triton_rows.grad_dtype(torch.bfloat16) == torch.bfloat16
    assert triton_rows.grad_dtype(torch.float16) == triton_rows.grad_dtype(torch.float32) == torch.float32


def calls_of_triton(path: Path) -> list[ast.Call]:
    """tl.something(...) in a file."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "tl"
    ]


def chosen_lines(path: Path, switch: str) -> set[int]:
    """Lines under `if SWITCH:`, a compile-time constant that the caller asked for."""
    tree = ast.parse(path.read_text())
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == switch]
    return {line for body in bodies for item in body for line in range(item.lineno, (item.end_lineno or 0) + 1)}


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: path.name)
def test_kernels_keep_to_what_the_interpreter_cannot_check(path: Path) -> None:
    """Undefined lanes (the interpreter reads 0 there), order of additions, grids beyond 65535."""
    for call in calls_of_triton(path):
        assert isinstance(call.func, ast.Attribute)
        where, names = f"{path.name}:{call.lineno}", {keyword.arg for keyword in call.keywords}
        if call.func.attr.startswith("atomic"):
            assert call.lineno in chosen_lines(path, "ATOMIC_DQ"), f"{where} adds in no fixed order"
        if call.func.attr == "load":
            assert len(call.args) == 1, f"{where}: name mask and other"
            assert "mask" not in names or "other" in names, f"{where} leaves masked lanes undefined"
        if call.func.attr == "program_id":
            assert [ast.literal_eval(argument) for argument in call.args] == [0], f"{where}: grids have one dimension"
