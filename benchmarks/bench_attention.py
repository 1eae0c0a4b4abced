"""Time and memory of attention under the interval mask, beside the ways in which others compute it.

    python benchmarks/bench_attention.py [--tokens 4096 --heads 8 --key-heads 2 --head-dim 64 --mask documents]
                                         [--mode forward] [--threads 2] [--providers ours,sdpa_per_document]
                                         [--record] [--plot]
    python benchmarks/bench_attention.py --sweep [--record]      1k to 4k tokens, every mask

Steps of all providers alternate in one process, and a ratio is the median over repetitions of two steps of the same
repetition. Peak memory is that of a process of its own per provider (CPU: resident memory). The roofline is a matrix
product of the same FLOPs at the speed of a large one, measured in the same alternation; TFLOP/s count visible pairs
only: 4 T T D / 2 forward for a causal document, 2.5 times that backward. `--record` appends the rows to
baselines/attention_DEVICE.csv, `--plot` draws that file.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from attention_providers import ON_CPU, PROVIDERS, run_provider, versions
from attention_shapes import MASKS, AttentionCase, make_inputs
from head_providers import first_line
from measure import interleaved, peak_memory
from recording import Row, append_row, circumstances, memory_in_child, print_memory, time_columns
from torch import Tensor

BASELINES = Path(__file__).parent / "baselines"
PRODUCT = "product"
PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}  # of the square matrices whose speed is the roofline
SWEEP = (1024, 2048, 4096)
COLUMNS = (
    *("date", "commit", "machine", "threads", "load_1m", "kernel", "provider", "device", "dtype", "T", "Hq", "Hkv"),
    *("D", "mask", "mode", "repeats", "p20_s", "p50_s", "p80_s", "cpu_p50_s", "tflops", "roofline_fraction"),
    *("ratio_to_ours", "cpu_ratio_to_ours", "difference_to_ours", "peak_mib_over_base", "versions", "note"),
)


def bench_case(case: AttentionCase, providers: Sequence[str], args: argparse.Namespace) -> Iterator[Row]:
    """One row per provider, whether it ran or not."""
    results = speed(case, providers, args.repeats)
    for name in providers:
        if args.memory and "note" not in results[name]:
            results[name] |= memory_in_child(__file__, case, name, args.threads)
    for name, found in results.items():
        yield {**_common(case, args, name), **found}


def speed(case: AttentionCase, providers: Sequence[str], repeats: int) -> dict[str, Row]:
    """Per provider its times, or a note why there are none."""
    inputs = make_inputs(case)
    results: dict[str, Row] = {}
    steps: dict[str, Callable[[], object]] = {}
    ours: list[Tensor] = []
    for name in providers:
        try:
            found = run_provider(name, inputs)  # compiled and warm afterwards
        except Exception as error:
            results[name] = {"note": f"not measured: {first_line(error)}"}
            continue
        ours = found if name == "ours" else ours
        results[name] = {"difference_to_ours": f"{_difference(found, ours):.1e}" if ours else ""}
        steps[name] = functools.partial(run_provider, name, inputs)
    del ours
    product = square_product(case)
    times = interleaved({**steps, PRODUCT: product}, repeats, device=case.device)
    speed_of_product = 2 * PRODUCT_SIZE[case.device] ** 3 / statistics.median(times.pop(PRODUCT).wall)
    for name, found_times in times.items():
        rate = case.flops(inputs.pairs) / found_times.quantile(0.5)
        results[name] |= {"tflops": f"{rate / 1e12:.4g}", "roofline_fraction": f"{rate / speed_of_product:.3f}"}
        results[name] |= time_columns(found_times, times.get("ours"))
    return results


def square_product(case: AttentionCase) -> Callable[[], object]:
    """A matrix product in the dtype of the case."""
    size = PRODUCT_SIZE[case.device]
    left, right = (torch.randn(size, size).to(case.device, getattr(torch, case.dtype)) for _ in range(2))
    out = torch.empty_like(left)
    run = functools.partial(torch.mm, left, right, out=out)
    run()
    return run


def memory_of(case: AttentionCase, name: str) -> Row:
    """Peak memory of one provider in this process."""
    inputs = make_inputs(case)
    step = functools.partial(run_provider, name, inputs)
    return {"peak_mib_over_base": round(peak_memory(step, device=case.device, clear=inputs.clear_gradients), 1)}


def _common(case: AttentionCase, args: argparse.Namespace, provider: str) -> Row:
    return {
        **circumstances(case.device, args.threads),
        **case.columns,
        "provider": provider,
        "versions": versions(),
    }


def _difference(found: list[Tensor], ours: list[Tensor]) -> float:
    """The largest over output and gradients, relative in the Euclidean norm."""
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, ours, strict=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--mask", choices=MASKS, default="documents")
    parser.add_argument("--mode", choices=("forward", "forward_backward"), default="forward_backward")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--providers", default="", help="default: all that can run on the device")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--sweep", action="store_true", help=f"{', '.join(map(str, SWEEP))} tokens, every mask")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.providers = args.providers.split(",") if args.providers else [*(ON_CPU if args.device == "cpu" else PROVIDERS)]
    if unknown := set(args.providers) - set(PROVIDERS):
        parser.error(f"--providers: {min(unknown)} is unknown, use some of {', '.join(PROVIDERS)}")
    return args


def main() -> None:
    args = _arguments()
    if args.memory_of:
        print_memory(args.memory_of, AttentionCase, memory_of)
        return
    torch.set_num_threads(args.threads)
    sizes = (args.heads, args.key_heads, args.head_dim)
    one = [(args.tokens, args.mask)]
    path = BASELINES / f"attention_{args.device}.csv"
    for tokens, mask in [(t, m) for t in SWEEP for m in MASKS] if args.sweep else one:
        case = AttentionCase(tokens, *sizes, mask, args.mode, args.dtype, args.device)
        print(case, flush=True)
        for row in bench_case(case, args.providers, args):
            shown = ("p50_s", "tflops", "ratio_to_ours", "cpu_ratio_to_ours", "peak_mib_over_base", "note")
            text = "  ".join(f"{name}={row[name]}" for name in shown if row.get(name))
            print(f"  {row['provider']:<18} {text}", flush=True)
            if args.record:
                append_row(path, COLUMNS, row)
    if args.plot:
        from attention_plot import plot

        print(f"wrote {plot(path)}")


if __name__ == "__main__":
    main()
