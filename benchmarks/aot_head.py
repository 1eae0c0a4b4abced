"""Compiles every shipped configuration of the head's Triton kernels without a GPU, and reports what the compiler made.

    python benchmarks/aot_head.py --arch 90             a table of registers, spills, shared memory, wgmma, PTX size
    python benchmarks/aot_head.py --arch 90 --json      the same, one JSON object a line
    python benchmarks/aot_head.py --arch 90 --write     ... and replaces this Triton's rows of the baseline

The baseline (benchmarks/baselines/head_registers.csv) has rows per Triton version; tests/unit/ops/test_triton_aot.py
compares with it. Registers and spills are what the wheel's own ptxas reports for the PTX, with Triton's flags.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from swe_rl.ops.triton_rows import kernel_module

BASELINE = Path(__file__).parent / "baselines" / "head_registers.csv"
SOFTCAP = 30.0  # any value: it is compiled in
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Build:
    """One specialisation: what Triton would compile at the first launch with such arguments."""

    kernel: str
    variant: str
    function: Any
    types: dict[str, str]  # of the run-time arguments
    config: Any  # KernelConfig
    constants: dict[str, Any]
    aligned: tuple[str, ...]  # arguments that are multiples of 16


@dataclass(frozen=True)
class Report:
    """What came out. shared_bytes are dynamic, per program; spill_bytes are stores and loads together."""

    triton: str
    arch: int
    kernel: str
    variant: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: int
    fp64: int
    ptx_bytes: int


def row_builds(*, smoke: bool) -> Iterator[Build]:
    """Statistics and gradient, with and without softcap; "odd": a vocabulary that is no multiple of 16."""
    rows = kernel_module("head_rows")
    for softcap in (0.0,) if smoke else (0.0, SOFTCAP):
        for odd in (False,) if smoke or softcap else (False, True):
            variant = f"softcap={softcap:g}" + (" odd" if odd else "")
            pointers = {"logits": "*fp32", "labels": "*i64", "inv_temperature": "*fp32"}
            types = {**pointers, "stats": "*fp32", "row_stride": "i32", "num_valid": "i32"}
            strides = () if odd else ("row_stride",)
            yield Build(
                "row_stats",
                variant,
                rows.row_stats_kernel,
                types,
                rows.STATS_CONFIG,
                {"SOFTCAP": softcap},
                (*pointers, "stats", *strides),
            )
            numbers = ("row_stride", "out_stride", "num_columns", "num_valid", "tiles")
            for dtype in (torch.bfloat16,) if smoke else (torch.bfloat16, torch.float32):
                types = {**pointers, "coeffs": "*fp32", "out": POINTERS[dtype], **dict.fromkeys(numbers, "i32")}
                strides = () if odd else ("row_stride", "out_stride")
                yield Build(
                    "row_grad",
                    f"{NAMES[dtype]} {variant}",
                    rows.row_grad_kernel,
                    types,
                    rows.GRAD_CONFIG,
                    {"SOFTCAP": softcap},
                    (*pointers, "coeffs", "out", *strides),
                )


def stream_builds(arch: int, *, smoke: bool) -> Iterator[Build]:
    """Scoring; "ragged": a hidden size that is a multiple of 16, but not of the tile."""
    stream = kernel_module("head_stream")
    numbers = ("num_rows", "num_columns", "num_valid", "split_columns", "num_splits")
    strides = ("hidden_stride", "weight_stride", "hidden_size")
    cases = [(torch.bfloat16, 0.0, True)]
    if not smoke:
        cases += [(torch.bfloat16, 0.0, False), (torch.bfloat16, SOFTCAP, True), (torch.bfloat16, SOFTCAP, False)]
        cases += [(torch.float16, 0.0, True), (torch.float32, 0.0, True), (torch.float32, SOFTCAP, False)]
    for dtype, softcap, whole in cases:
        pointers = {"hidden": POINTERS[dtype], "weight": POINTERS[dtype], "labels": "*i64"}
        pointers |= {"inv_temperature": "*fp32", "stats": "*fp32"}
        yield Build(
            "stream",
            f"{NAMES[dtype]} softcap={softcap:g}" + ("" if whole else " ragged"),
            stream.stream_kernel,
            {**pointers, **dict.fromkeys((*strides, *numbers), "i32")},
            stream.stream_config(dtype, arch),
            {"SOFTCAP": softcap, "WHOLE_K": whole, "UPCAST": False, "GROUP": stream.GROUP},
            (*pointers, *strides),
        )


def compile_build(build: Build, arch: int) -> Report:
    """Compiles to a cubin; raises what the compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = build.function.arg_names
    constants = {**build.constants, **build.config.constants}
    signature = {name: "constexpr" if name in constants else build.types[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned}
    options = {key: value for key, value in build.config.keywords().items() if key not in constants}
    source = ASTSource(build.function, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, spills = assemble(ptx, arch)
    return Report(
        triton=triton.__version__,
        arch=arch,
        kernel=build.kernel,
        variant=build.variant,
        registers=registers,
        spill_bytes=spills,
        shared_bytes=compiled.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        fp64=len(re.findall(r"\.f64\b", ptx)),
        ptx_bytes=len(ptx),
    )


def assemble(ptx: str, arch: int) -> tuple[int, int]:
    """(registers per thread, spilled bytes) by the ptxas that Triton uses for `arch`."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", "--fmad=false", f"--gpu-name={target}", str(source)]
        done = subprocess.run([*command, "-o", f"{folder}/kernel.cubin"], capture_output=True, text=True)
    said = done.stdout + done.stderr
    used = re.search(r"Used (\d+) registers", said)
    if done.returncode or used is None:
        raise RuntimeError(f"ptxas failed: {said[-2000:]}")
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    return int(used[1]), sum(int(amount) for amount in spills)


def reports(arch: int, *, smoke: bool, only: str = "") -> Iterator[Report]:
    """Compiles the builds whose kernel name contains `only`."""
    for build in (*row_builds(smoke=smoke), *stream_builds(arch, smoke=smoke)):
        if only in build.kernel:
            yield compile_build(build, arch)


def read_baseline(path: Path = BASELINE) -> list[Report]:
    """Rows of the baseline, in its order."""
    if not path.exists():
        return []
    types = {field.name: field.type for field in fields(Report)}
    with path.open(newline="") as file:
        return [
            Report(**{n: int(v) if types[n] == "int" else v for n, v in row.items()}) for row in csv.DictReader(file)
        ]


def write_baseline(new: list[Report], path: Path = BASELINE) -> None:
    """Replaces the rows of the same Triton and architecture."""
    places = {(report.triton, report.arch) for report in new}
    kept = [report for report in read_baseline(path) if (report.triton, report.arch) not in places]
    rows = sorted([*kept, *new], key=lambda r: ([int(n) for n in r.triton.split(".")], r.arch, r.kernel, r.variant))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Report)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(report) for report in rows)


def main() -> None:
    run(__doc__, reports, BASELINE)


def run(description: str | None, reports: Callable[..., Iterator[Report]], baseline: Path) -> None:
    """The command line, for any set of kernels: `reports` takes (arch, smoke=, only=)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, help="compute capability: 80, 90, 100")
    parser.add_argument("--smoke", action="store_true", help="one variant of each kernel")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--write", action="store_true", help="replace these rows of the baseline")
    options = parser.parse_args()
    if options.write and (options.smoke or options.only):
        parser.error("--write replaces all rows of an architecture: leave out --smoke and --only")
    found = []
    for report in reports(options.arch, smoke=options.smoke, only=options.only):
        found.append(report)
        line = json.dumps(asdict(report)) if options.json else "  ".join(f"{k}={v}" for k, v in asdict(report).items())
        print(line, flush=True)
    if options.write:
        write_baseline(found, baseline)


if __name__ == "__main__":
    main()
