"""The CUDA source of weight_delta compiles for what build.sh builds, without a spill (tests/gpu runs it)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from real_parts import require

SOURCE = Path(__file__).parents[3] / "csrc" / "ops" / "weight_delta.cu"
KERNELS = {"count_kernel", "fill_kernel", "apply_kernel", "checksum_kernel"}
ARCHITECTURES = ("sm_80", "sm_90")  # planning.hardware.DEVICES: A100; H100 and H200
MAX_REGISTERS = 40  # 2048 threads fit on a multiprocessor up to 32; the passes wait for memory, some fewer do as well


def compile_for(arch: str, folder: Path) -> str:
    """What the assembler says of each kernel."""
    require(shutil.which("nvcc") is not None, "nvcc")
    command = ["nvcc", "-O3", "-std=c++17", f"-arch={arch}", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings"]
    done = subprocess.run(
        [*command, str(SOURCE), "-o", str(folder / "out.cubin")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_every_gpu_that_is_planned_for_has_code() -> None:
    """A library without code for a GPU would be loaded there, and fail at the first call."""
    assert set(re.findall(r"code=(sm_\d+)", SOURCE.with_name("build.sh").read_text())) == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_compiles_without_a_spill(arch: str, tmp_path: Path) -> None:
    report = compile_for(arch, tmp_path)
    found = set()
    for part in re.split(r"Compiling entry function", report)[1:]:
        name = next(kernel for kernel in KERNELS if kernel in part)
        found.add(name)
        assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", part), part
        registers = re.search(r"Used (\d+) registers", part)
        assert registers is not None
        assert int(registers[1]) <= MAX_REGISTERS, f"{name} uses {registers[1]} registers"
    assert found == KERNELS
