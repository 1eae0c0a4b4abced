"""Every shipped configuration of the attention kernels compiles without a GPU, and stays as good as it was.

The gates are those of test_triton_aot.py, with one difference: what the backward kernels spill, dK and dV with two
accumulators of a tile, is reported, and bounded.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_parts import require
from triton_versions import INSTALLED, OLDER_BY_NIGHT, ROOT, compiled

from benchmarks.aot_head import Report, read_baseline

BASELINE = ROOT / "benchmarks" / "baselines" / "attention_registers.csv"
KERNELS = {"attention_forward", "attention_query_grad", "attention_key_grad", "attention_delta"}
SHARED_LIMIT = 227 * 1024
PTX_LIMIT = 1024 * 1024
# Bytes, stores and loads together; all else spills nothing. dQ of a head_dim of 256 spills 8 with Triton 3.6 only.
SPILL_LIMITS = {"attention_key_grad": 160, "attention_query_grad": 8}
REGISTER_SLACK = 8
NUM_BUILDS = 25


def faults(report: Report) -> list[str]:
    """What a gate says against one configuration."""
    # fp32 is exact, on ordinary units; dK and dV of a head_dim of 256 fit no tile of 64 keys, the least for wgmma.
    wide = report.kernel == "attention_key_grad" and "D=256" in report.variant
    dot = report.kernel != "attention_delta" and not report.variant.startswith("fp32") and not wide
    spill = SPILL_LIMITS.get(report.kernel, 0)
    found = {
        f"spills {report.spill_bytes} bytes": report.arch == 90 and report.spill_bytes > spill,
        f"needs {report.shared_bytes} bytes of shared memory": report.shared_bytes > SHARED_LIMIT,
        "has a product without wgmma": report.arch == 90 and dot and report.wgmma == 0,
        f"has {report.fp64} fp64 instructions": report.fp64 > 0,
        f"is {report.ptx_bytes} bytes of PTX": report.ptx_bytes > PTX_LIMIT,
    }
    return [
        f"{report.kernel} [{report.variant}] on sm_{report.arch} {fault}" for fault, is_so in found.items() if is_so
    ]


def test_the_forward_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    found = compiled("aot_attention.py", INSTALLED, tmp_path, "--arch", "90", "--smoke", "--only", "forward")
    assert [report.kernel for report in found] == ["attention_forward"]
    assert not [fault for report in found for fault in faults(report)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("triton", OLDER_BY_NIGHT)
def test_every_hopper_configuration_passes_the_gates(triton: str, tmp_path: Path) -> None:
    found = compiled("aot_attention.py", triton, tmp_path, "--arch", "90")
    assert len(found) == NUM_BUILDS
    assert {report.kernel for report in found} == KERNELS
    assert not [fault for report in found for fault in faults(report)]
    rows = read_baseline(BASELINE)
    before = {(r.kernel, r.variant): r for r in rows if (r.triton, r.arch) == (found[0].triton, 90)}
    require(bool(before), f"a row of {BASELINE.name} for Triton {found[0].triton} (aot_attention.py --arch 90 --write)")
    for report in found:
        old = before[report.kernel, report.variant]
        assert report.registers <= old.registers + REGISTER_SLACK, report
        assert report.spill_bytes <= max(old.spill_bytes, 16), report
        assert report.shared_bytes <= old.shared_bytes, report
        assert report.wgmma >= old.wgmma, report


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["80", "100"])
@pytest.mark.parametrize("triton", OLDER_BY_NIGHT)
def test_neighbouring_architectures_compile(triton: str, arch: str, tmp_path: Path) -> None:
    found = compiled("aot_attention.py", triton, tmp_path, "--arch", arch, "--smoke")
    assert {report.kernel for report in found} == KERNELS
    assert not [fault for report in found for fault in faults(report)]


def test_faults_are_named() -> None:
    bad = Report("3.9.0", 90, "attention_key_grad", "bf16 D=128", 255, 168, 300_000, 0, 1, 2_000_000)
    said = "\n".join(faults(bad))
    for word in ("spills 168", "300000 bytes of shared", "without wgmma", "1 fp64", "2000000 bytes of PTX"):
        assert word in said
    good = Report("3.9.0", 90, "attention_key_grad", "bf16 D=128", 255, 160, 147_456, 8, 0, 233_698)
    assert not faults(good)
    for kernel, spilled in (("attention_forward", 8), ("attention_query_grad", 16)):
        assert faults(Report("3.9.0", 90, kernel, "bf16 D=128", 255, spilled, 147_456, 8, 0, 233_698))


def test_the_baseline_passes_the_gates() -> None:
    assert not [fault for report in read_baseline(BASELINE) for fault in faults(report)]


def test_the_baseline_has_both_supported_ends() -> None:
    assert {report.triton for report in read_baseline(BASELINE)} >= {"3.6.0", "3.9.0"}
