"""The GPU suite without a GPU: it runs on a bare machine, says what it did not measure, and its parts work on a CPU."""

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import gpu_checks
import gpu_suite
import pytest
from head_cases import HeadCase
from real_parts import require

from swe_rl.ops import cpu_rows

ROOT = Path(__file__).parents[3]
needs_kernels = pytest.mark.skipif(not cpu_rows.available()[0], reason="the C++ kernels are not built")


def _run_bare(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [sys.executable, str(Path(__file__).with_name("bare_machine.py")), code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_it_runs_on_a_bare_machine_and_says_that_nothing_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "gpu.csv"
    done = _run_bare(
        f"import gpu_suite, sys; sys.argv[1:] = ['--out', {str(out)!r}]; sys.exit(gpu_suite.main())", tmp_path
    )
    assert done.returncode == 0, done.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["verdict"], row["note"]) for row in rows} == {("not measured", "no CUDA device")}
    assert {row["section"] for row in rows} == set(gpu_suite.SECTIONS)
    assert [row["limit"] for row in rows if row["name"] == "f=1 ours time"] == ["48", ""]  # training, scoring
    assert len(done.stdout.splitlines()) == len(rows)


@needs_kernels
def test_the_operations_run_on_a_bare_machine(tmp_path: Path) -> None:
    code = """
import sys
import gpu_checks
from head_cases import HeadCase
print(gpu_checks.head_error(HeadCase(84, 20, 301, 0.3)))
assert "swe_rl.kernels" not in sys.modules
"""
    done = _run_bare(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


def test_the_triton_kernels_are_found_beside_the_package_on_a_bare_machine(tmp_path: Path) -> None:
    require(importlib.util.find_spec("triton") is not None, "package triton")
    code = """
import torch
from swe_rl.ops import linear_logprob
hidden, weight, labels = torch.randn(5, 16), torch.randn(37, 16), torch.arange(5)
found = [linear_logprob(hidden, weight, labels, impl=impl)[0] for impl in ("triton", "reference")]
print(float((found[0] - found[1]).abs().max()))
"""
    done = _run_bare(code, tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


@needs_kernels
@pytest.mark.parametrize("vocab_size", [7, 1000])
def test_the_checks_pass_on_the_kernels_of_the_cpu(vocab_size: int) -> None:
    training = HeadCase(84, 20, vocab_size, 0.3)
    assert 0 < gpu_checks.head_error(training) < gpu_checks.FLOAT32_LIMIT
    assert 0 < gpu_checks.scoring_error(HeadCase(84, 20, vocab_size, 0.3, "scoring")) < gpu_checks.FLOAT32_LIMIT
    assert gpu_checks.differing_repeats(training, 3) == 0


@needs_kernels
def test_a_wrong_gradient_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu_rows.row_grad
    monkeypatch.setattr(cpu_rows, "row_grad", lambda *args, **named: right(*args, **named).mul_(1.0001))
    assert gpu_checks.head_error(HeadCase(84, 20, 301, 0.3)) > gpu_checks.FLOAT32_LIMIT


def _suite(tmp_path: Path, seconds: float = 100) -> gpu_suite.Suite:
    return gpu_suite.Suite("correctness", tmp_path / "gpu.csv", seconds, "a GPU")


def _rows(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "gpu.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_measurement_passes_fails_or_says_why_it_is_missing(tmp_path: Path) -> None:
    suite = _suite(tmp_path)

    def broken() -> float:
        raise RuntimeError("illegal access\nand more")

    assert suite.measure("low", "ms", lambda: 47.9, limit=48)
    assert suite.measure("free", "ms", lambda: 1e9)
    assert not suite.measure("another project", "ms", broken, required=False)
    assert not suite.failed
    assert suite.measure("high", "ms", lambda: 48.1, limit=48)
    assert suite.failed
    assert not suite.measure("ours", "ms", broken)
    late = gpu_suite.Suite("correctness", tmp_path / "gpu.csv", 0, "a GPU")
    assert not late.measure("late", "ms", broken)
    assert not late.failed
    found = [(row["name"], row["value"], row["verdict"], row["note"]) for row in _rows(tmp_path)]
    assert found == [
        ("low", "47.9", "passed", ""),
        ("free", "1e+09", "measured", ""),
        ("another project", "", "not measured", "RuntimeError: illegal access"),
        ("high", "48.1", "failed", ""),
        ("ours", "", "failed", "RuntimeError: illegal access"),
        ("late", "", "not measured", "out of time"),
    ]


@needs_kernels
def test_speed_rows_have_ratios_and_roofline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "REPEATS", 3)
    monkeypatch.setattr(gpu_suite, "HEAD_LIMIT_MS", 1e9)  # no statement about this machine
    monkeypatch.setitem(sys.modules, "trl", None)
    suite = _suite(tmp_path)
    gpu_suite._speed(suite, HeadCase(172, 24, 301, 1.0), ("ours", "eager", "trl_selective"))
    rows = {row["name"]: row for row in _rows(tmp_path)}
    assert rows["f=1 trl_selective memory"]["note"] == "trl is not installed"
    assert "f=1 trl_selective time" not in rows
    assert (rows["f=1 ours time"]["verdict"], rows["f=1 eager time"]["verdict"]) == ("passed", "measured")
    assert "ratio_to_ours=1.00" in rows["f=1 ours time"]["detail"]
    assert float(rows["f=1 products time"]["value"]) > 0
    assert not suite.failed


def test_a_section_that_hangs_or_crashes_is_a_failed_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def child(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        if command[command.index("--child") + 1] == "scoring":
            raise subprocess.TimeoutExpired(command, 1)
        return subprocess.CompletedProcess(command, -11)

    monkeypatch.setattr(gpu_suite.subprocess, "run", child)
    assert gpu_suite.run_sections(["correctness", "scoring"], tmp_path / "gpu.csv", minutes=8) == 1
    assert [(row["verdict"], row["detail"]) for row in _rows(tmp_path)] == [
        ("failed", "ended with exit code -11"),
        ("failed", "did not end within 480 s"),
    ]
    assert gpu_suite.run_sections(["scoring"], tmp_path / "gpu.csv", minutes=0.1) == 0
    assert (_rows(tmp_path)[-1]["verdict"], _rows(tmp_path)[-1]["note"]) == ("not measured", "out of time")
