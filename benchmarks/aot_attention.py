"""Compiles every shipped configuration of the attention kernels without a GPU, and reports what the compiler made.

    python benchmarks/aot_attention.py --arch 90            a table of registers, spills, shared memory, wgmma
    python benchmarks/aot_attention.py --arch 90 --json     the same, one JSON object a line
    python benchmarks/aot_attention.py --arch 90 --write    ... and replaces this Triton's rows of the baseline

The baseline is benchmarks/baselines/attention_registers.csv; tests/unit/ops/test_attention_aot.py compares with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from aot_head import NAMES, POINTERS, Build, Report, compile_build, run

from swe_rl.ops.triton_rows import kernel_module

BASELINE = Path(__file__).parent / "baselines" / "attention_registers.csv"
HEADS, SHARED = 32, 4  # any: they are compiled in
# (dtype, head_dim); 80 is no power of two, so that columns are masked.
CASES = (
    (torch.bfloat16, 64), (torch.bfloat16, 80), (torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 128),
)  # fmt: skip
SMOKE = ((torch.bfloat16, 128),)
NUMBERS = {
    "num_tokens": "i32",
    "num_blocks": "i32",
    "num_ranges": "i32",
    "scale": "fp32",
    "natural_scale": "fp32",
}
INTEGERS = ("kv_end", "full_ranges", "masked_ranges", "counts", "lowest_end", "highest_end")
SUMS = ("lse", "delta")


def builds(arch: int, *, smoke: bool) -> Iterator[Build]:
    """Forward, delta, dK with dV, dQ; "atomic": dQ in the kernel of dK and dV."""
    forward, backward = kernel_module("attention_forward"), kernel_module("attention_backward")
    for dtype, head_dim in SMOKE if smoke else CASES:
        size = {"D": head_dim, "BLOCK_D": forward.tile_columns(head_dim)}
        heads = {"HEADS": HEADS, "SHARED": SHARED, "UPCAST": False, **size}
        config = forward.forward_config(dtype, head_dim, arch)
        yield _build("attention_forward", forward.forward_kernel, dtype, head_dim, config, heads)
        config = backward.query_config(dtype, head_dim, arch)
        yield _build("attention_query_grad", backward.query_grad_kernel, dtype, head_dim, config, heads)
        heads = {"KEY_HEADS": HEADS // SHARED, "SHARED": SHARED, "UPCAST": False, **size}
        config = backward.key_config(dtype, head_dim, arch)
        for atomic in (False,) if smoke else (False, True):
            constants = {**heads, "ATOMIC_DQ": atomic}
            word = " atomic" if atomic else ""
            yield _build("attention_key_grad", backward.key_grad_kernel, dtype, head_dim, config, constants, word)
        constants = {"HEADS": HEADS, "ROWS": backward.DELTA_ROWS, **size}
        yield _build("attention_delta", backward.delta_kernel, dtype, head_dim, _default_config(), constants)


def _default_config() -> Any:
    launch: ModuleType = kernel_module("launch")
    return launch.KernelConfig({}, num_warps=4, num_stages=3)  # what a launch without options gets


def _build(
    kernel: str,
    function: Any,
    dtype: torch.dtype,
    head_dim: int,
    config: Any,
    constants: dict[str, Any],
    word: str = "",
) -> Build:
    types, aligned = {}, []
    for name in function.arg_names:
        if name in constants or name in config.constants:
            continue
        if name in NUMBERS:
            types[name] = NUMBERS[name]
            continue
        aligned.append(name)
        if name.endswith(("_stride", "_head")):
            types[name] = "i32"
        elif name in INTEGERS:
            types[name] = "*i32"
        else:
            wide = name in SUMS or (name == "dq_out" and constants.get("ATOMIC_DQ"))
            types[name] = "*fp32" if wide else POINTERS[dtype]
    return Build(kernel, f"{NAMES[dtype]} D={head_dim}{word}", function, types, config, constants, tuple(aligned))


def reports(arch: int, *, smoke: bool, only: str = "") -> Iterator[Report]:
    """Compiles the builds whose kernel name contains `only`."""
    for build in builds(arch, smoke=smoke):
        if only in build.kernel:
            yield compile_build(build, arch)


if __name__ == "__main__":
    run(__doc__, reports, BASELINE)
