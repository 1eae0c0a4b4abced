"""Every shipped configuration of the head's kernels compiles without a GPU, and stays as good as it was.

The values behind the gates: 227 KB of shared memory per block on sm_90; a spilled register costs memory traffic in the
innermost loop; `wgmma` is the only way to the tensor cores' full rate; one fp64 instruction runs at 1/64 of the rate.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_parts import require
from triton_versions import INSTALLED, TRITONS, compiled

from benchmarks.aot_head import BASELINE, Report, read_baseline

SHARED_LIMIT = 227 * 1024
PTX_LIMIT = 512 * 1024
REGISTER_SLACK = 8  # one allocation unit of the register file
PTX_SLACK = 1.1


def faults(report: Report) -> list[str]:
    """What a gate says against one configuration."""
    dot = report.kernel == "stream" and not report.variant.startswith("fp32")  # fp32 is exact, on ordinary units
    found = {
        f"spills {report.spill_bytes} bytes": report.arch == 90 and report.spill_bytes > 0,
        f"needs {report.shared_bytes} bytes of shared memory": report.shared_bytes > SHARED_LIMIT,
        "has a product without wgmma": report.arch == 90 and dot and report.wgmma == 0,
        f"has {report.fp64} fp64 instructions": report.fp64 > 0,
        f"is {report.ptx_bytes} bytes of PTX": report.ptx_bytes > PTX_LIMIT,
    }
    return [
        f"{report.kernel} [{report.variant}] on sm_{report.arch} {fault}" for fault, is_so in found.items() if is_so
    ]


def regressions(report: Report, before: Report) -> list[str]:
    """What got worse against the baseline."""
    found = {
        f"uses {report.registers} registers, before {before.registers}": report.registers
        > before.registers + REGISTER_SLACK,
        f"uses {report.shared_bytes} bytes of shared memory, before {before.shared_bytes}": report.shared_bytes
        > before.shared_bytes,
        f"has {report.ptx_bytes} bytes of PTX, before {before.ptx_bytes}": report.ptx_bytes
        > before.ptx_bytes * PTX_SLACK,
        f"has {report.wgmma} wgmma, before {before.wgmma}": report.wgmma < before.wgmma,
    }
    return [f"{report.kernel} [{report.variant}] {fault}" for fault, is_so in found.items() if is_so]


def test_row_kernels_compile_for_hopper(tmp_path: Path) -> None:
    found = compiled("aot_head.py", INSTALLED, tmp_path, "--arch", "90", "--smoke", "--only", "row_")
    assert {report.kernel for report in found} == {"row_stats", "row_grad"}
    assert not [fault for report in found for fault in faults(report)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("triton", TRITONS)
def test_every_hopper_configuration_passes_the_gates(triton: str, tmp_path: Path) -> None:
    found = compiled("aot_head.py", triton, tmp_path, "--arch", "90")
    assert not [fault for report in found for fault in faults(report)]
    assert len(found) == 16
    before = {(r.kernel, r.variant): r for r in read_baseline() if (r.triton, r.arch) == (found[0].triton, 90)}
    require(bool(before), f"a row of {BASELINE.name} for Triton {found[0].triton} (aot_head.py --arch 90 --write)")
    assert before.keys() == {(r.kernel, r.variant) for r in found}, "aot_head.py --arch 90 --write renews the baseline"
    worse = [line for report in found for line in regressions(report, before[report.kernel, report.variant])]
    assert not worse, "\n".join(worse)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["80", "100"])
@pytest.mark.parametrize("triton", TRITONS)
def test_neighbouring_architectures_compile(triton: str, arch: str, tmp_path: Path) -> None:
    found = compiled("aot_head.py", triton, tmp_path, "--arch", arch, "--smoke")
    assert {report.kernel for report in found} == {"row_stats", "row_grad", "stream"}
    assert not [fault for report in found for fault in faults(report)]


def test_a_fault_and_a_regression_are_named() -> None:
    bad = Report("3.9.0", 90, "stream", "bf16 softcap=0", 255, 8, 300_000, 0, 1, 600_000)
    said = "\n".join(faults(bad))
    for word in ("spills 8", "300000 bytes of shared", "without wgmma", "1 fp64", "600000 bytes of PTX"):
        assert word in said
    good = Report("3.9.0", 90, "stream", "bf16 softcap=0", 240, 0, 147_456, 8, 0, 233_698)
    assert not faults(good)
    assert not regressions(good, good)
    assert len(regressions(bad, good)) == 4


def test_the_baseline_has_both_supported_ends() -> None:
    assert {report.triton for report in read_baseline()} >= {"3.6.0", "3.9.0"}
