"""Compiles the rope kernel without a GPU, and reports what the compiler made, as aot_head.py does for the head.

python benchmarks/aot_rope.py --arch 90 [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

import torch
from aot_head import NAMES, POINTERS, Build, Report, compile_build

from swe_rl.ops.triton_rows import kernel_module

SHAPES = ((64, 8, 128, 64), (9, 3, 64, 32), (32, 8, 96, 36))  # heads, key heads, head dim, pairs


def builds() -> Iterator[Build]:
    """Forward and backward, with and without dimensions that pass through."""
    rope = kernel_module("rope")
    strides = ("q_stride", "q_head_stride", "k_stride", "k_head_stride")
    for heads, kv_heads, dim, half in SHAPES:
        for dtype, inverse in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)):
            pointers = dict.fromkeys(("q", "k", "q_out", "k_out"), POINTERS[dtype])
            pointers |= {"position_ids": "*i64", "inv_freq": "*fp32", "attention_factor": "*fp32"}
            q, k = torch.empty(0, heads, dim), torch.empty(0, kv_heads, dim)
            yield Build(
                "rope",
                f"{NAMES[dtype]} {heads}/{kv_heads}x{dim} pairs={half}" + (" inverse" if inverse else ""),
                rope.rope_kernel,
                {**pointers, **dict.fromkeys(strides, "i32")},
                rope.CONFIG,
                rope.constants(q, k, half, inverse=inverse),
                (*pointers, *strides),
            )


def reports(arch: int) -> Iterator[Report]:
    yield from (compile_build(build, arch) for build in builds())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, help="compute capability: 80, 90, 100")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    for report in reports(options.arch):
        found = asdict(report)
        print(json.dumps(found) if options.json else "  ".join(f"{k}={v}" for k, v in found.items()), flush=True)


if __name__ == "__main__":
    main()
